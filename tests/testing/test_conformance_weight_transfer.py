"""The in-tree weight transfers pass the suite of their kind."""

from __future__ import annotations

import pytest

from frame.plugins.loader import load_registry
from frame.testing.conformance import Setting, find, run_suite
from frame.testing.weight_transfer import suite

REGISTRY = load_registry(installed=False)
SKIPPED = {
    "ipc": {"a_trainer_that_sends_nothing", "a_trainer_that_does_not_join", "receive_needs_open", "close_ends_an_open_that_waits"},
    "group": {
        "the_senders_memory_is_not_written",
        "a_file_that_is_cut_off_while_it_is_read",
        "handles_are_names_in_shared_memory",
        "handles_of_what_is_no_file",
        "files_of_other_users",
        "tensors_outside_of_their_buffer",
        "a_tensor_may_fill_its_buffer",
        "abandoned_and_refused_parts_leave_nothing_open",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SKIPPED))
def test_our_transfers(name: str) -> None:
    outcomes = run_suite(find(REGISTRY, f"weight_transfer:{name}", Setting()))
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    assert {outcome.check for outcome in outcomes if outcome.result == "skipped"} == SKIPPED[name]


def test_a_thread_that_ends_late_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that ended since the counts before: another plugin's, for example."""
    counts = iter([(9, 0, 4), (9, 0, 3), (8, 0, 2)])
    monkeypatch.setattr(suite, "_count_open", lambda: next(counts))
    suite._require_no_more((9, 0, 3), "parts")
    suite._require_no_more((9, 0, 3), "parts")
    monkeypatch.setattr(suite, "_count_open", lambda: (9, 0, 4))
    monkeypatch.setattr(suite, "MAX_END_SECONDS", 0.1)
    with pytest.raises(AssertionError, match="parts leave files, mappings and threads open"):
        suite._require_no_more((9, 0, 3), "parts")
