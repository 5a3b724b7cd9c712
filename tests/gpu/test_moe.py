"""Routing and expert products, compiled; and every MoE runner that says it runs on a GPU keeps the laws there."""

from __future__ import annotations

import pytest
import torch

from frame.core.errors import PluginError
from frame.plugins.loader import load_registry
from frame.testing import conformance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REGISTRY = load_registry(installed=False)
NAMES = [
    record.name
    for record in REGISTRY.records("moe_runner")
    if "cuda" in getattr(record.capabilities, "devices", ()) and not record.problems
]


def _checks() -> list[tuple[str, conformance.Check]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for name in NAMES:
        try:
            subject = conformance.find(REGISTRY, f"moe_runner:{name}", conformance.Setting(device="cuda", thorough=True))
        except PluginError:
            continue  # a library that this machine lacks; the record says which
        found += [(name, check) for check in conformance.checks("moe_runner", subject)]
    return found


CHECKS = _checks()


@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=[f"{name}-{check.name}" for name, check in CHECKS])
def test_runner_on_a_gpu(check: conformance.Check) -> None:
    check.run()


def test_some_runner_was_checked() -> None:
    assert {name for name, _ in CHECKS} >= {"torch_native", "torch_grouped", "triton"}


if torch.cuda.is_available():
    from tests.kernels.moe import *  # noqa: F403
