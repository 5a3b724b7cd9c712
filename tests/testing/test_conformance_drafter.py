"""The in-tree drafters pass the suite of their kind."""

from __future__ import annotations

import contextlib

import pytest

from frame.plugins.loader import load_registry
from frame.testing.conformance import Setting, SkipCheck, find
from frame.testing.drafter.suite import suite

REGISTRY = load_registry(installed=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [record.name for record in REGISTRY.records("drafter")])
def test_in_tree_drafter(name: str) -> None:
    for check in suite(find(REGISTRY, f"drafter:{name}", Setting())):
        with contextlib.suppress(SkipCheck):  # of heads, which read a checkpoint of their own form
            check.run()
