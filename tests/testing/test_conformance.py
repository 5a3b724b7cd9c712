"""Every in-tree plugin that runs on a CPU passes the suite of its kind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.checkpoints import make_checkpoint
from tests.testing.small_sizes import use_small_sizes

REGISTRY = load_registry(installed=False)
SMALL = ("weight_format", "gemm_kernel", "moe_runner", "moe_dispatcher", "logits_processor", "tool_call_parser", "reasoning_parser")


def _selectors() -> list[str]:
    """Every plugin that runs on a CPU and that no other test checks already."""
    found = []
    for family in SMALL:
        for record in REGISTRY.records(family):
            if not record.problems and "cpu" in getattr(record.capabilities, "devices", ("cpu",)):
                found.append(f"{family}:{record.name}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["small", "whole"])
@pytest.mark.parametrize("selector", _selectors())
def test_our_own_plugins_conform(selector: str, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_small:
        use_small_sizes(monkeypatch)
    subject = conformance.find(REGISTRY, selector, conformance.Setting())
    for check in conformance.checks(selector.partition(":")[0], subject):
        with suppress(conformance.SkipCheck):
            check.run()


@pytest.mark.parametrize("name", ["LlamaForCausal", "LamaForCausalLM", "Nothing", ""])
def test_an_unknown_checkpoint_names_those_that_are_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"make_checkpoint can write.*Names: .*LlamaForCausalLM"):
        make_checkpoint(name, tmp_path)
