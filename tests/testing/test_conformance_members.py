"""Every in-tree pooler passes the conformance checks of its kind."""

from __future__ import annotations

import pytest

from frame.plugins.loader import load_registry
from frame.testing import conformance

REGISTRY = load_registry(installed=False)
KINDS = ("pooler",)
SELECTORS = [f"{kind}:{record.name}" for kind in KINDS for record in REGISTRY.records(kind)]


@pytest.mark.parametrize("selector", SELECTORS)
def test_in_tree(selector: str) -> None:
    outcomes = conformance.run_suite(conformance.find(REGISTRY, selector, conformance.Setting()))
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    assert len(outcomes) > 10
