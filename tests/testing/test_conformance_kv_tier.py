"""The in-tree KV cache tiers pass the suite of their kind."""

from __future__ import annotations

import pytest

from frame.plugins.loader import load_registry
from frame.testing.conformance import Setting, find, run_suite

REGISTRY = load_registry(installed=False)
FILES = {
    "clear_empties_the_folder",
    "each_byte_of_a_file_counts",
    "files_that_have_changed_are_not_served",
    "files_that_cannot_be_read",
    "blocks_that_fail_are_listed_as_removed",
    "blocks_survive_a_restart",
    "the_quota_is_kept_over_restarts",
}
IN_MEMORY = "buffers_in_memory_hold_blocks_at_once"
PLACES = FILES | {"other_identities_are_not_served"}
SKIPPED = {"host": PLACES, "disk": {IN_MEMORY}, "nixl": PLACES | {IN_MEMORY}}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SKIPPED))
def test_our_tiers(name: str) -> None:
    if name == "nixl":
        pytest.importorskip("nixl_cu13")
    outcomes = run_suite(find(REGISTRY, f"kv_tier:{name}", Setting()))
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    assert {outcome.check for outcome in outcomes if outcome.result == "skipped"} == SKIPPED[name]
