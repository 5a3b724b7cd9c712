"""Every in-tree pooler and KV allocator passes the conformance checks of its kind, and so do the
key store of the settings and the sampler of CPUs. tests/plugins/key_stores/test_http.py runs those
of `http`, which needs an endpoint; tests/gpu those of the sampler with kernels."""

from __future__ import annotations

import pytest

from frame.plugins.loader import load_registry
from frame.testing import conformance
from tests.testing.small_sizes import use_small_sizes

REGISTRY = load_registry(installed=False)
KINDS = ("pooler", "kv_allocator")
SELECTORS = ["key_store:file", "sampler:torch", *(f"{kind}:{record.name}" for kind in KINDS for record in REGISTRY.records(kind))]


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["small", "whole"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_in_tree(selector: str, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_small:
        use_small_sizes(monkeypatch)
    outcomes = conformance.run_suite(conformance.find(REGISTRY, selector, conformance.Setting()))
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    assert len(outcomes) > 10 and {outcome.result for outcome in outcomes} == {"passed"}
