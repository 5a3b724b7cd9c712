"""The kernels of routing and experts, compiled; and every MoE runner that states CUDA passes the
conformance suite there."""

from __future__ import annotations

import pytest
import torch

from frame.testing import conformance
from tests.gpu.conformance_checks import checks_on, ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CHECKS, MISSING = checks_on("cuda", "moe_runner")


@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=ids(CHECKS))
def test_runner_on_a_gpu(check: conformance.Check) -> None:
    check.run()


@pytest.mark.parametrize("name", MISSING)
def test_what_is_not_checked(name: str) -> None:
    pytest.skip(f"{name}: {MISSING[name]}")


def test_some_runner_was_checked() -> None:
    assert {name for name, _ in CHECKS} >= {"torch_native", "torch_grouped", "triton"}


if torch.cuda.is_available():
    from tests.kernels.moe import *  # noqa: F403
