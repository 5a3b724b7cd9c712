"""Every in-tree policy passes the conformance checks of its kind, and whole runs find what single
calls do not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from frame.core.interfaces.scheduling import SchedulerView
from frame.core.scheduling.request import Request
from frame.plugins.loader import load_registry
from frame.testing import conformance
from tests.testing.mutants import Mutant, load_mutants
from tests.testing.mutants.scheduling_policy import PreemptsTheOldest, ShortestFirst

REGISTRY = load_registry(installed=False)
KINDS = ("scheduling_policy", "eviction_policy", "routing_policy")
SELECTORS = [f"{kind}:{record.name}" for kind in KINDS for record in REGISTRY.records(kind)]


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_in_tree(selector: str) -> None:
    subject = conformance.find(REGISTRY, selector, conformance.Setting())
    for check in conformance.checks(selector.partition(":")[0], subject):
        check.run()


class FailsLate(ShortestFirst):
    """Fails when it has to choose among requests that all have output."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        if all(request.output for request in running):
            raise RuntimeError("odd")
        return super().select_victim(running, view)


class FirstFew(ShortestFirst):
    """Orders no more requests than a step takes, as the contract allows."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterator[Request]:
        left = view.token_budget
        for request in super().sort_waiting(waiting, view):
            yield request
            left -= request.prompt_len
            if left <= 0:
                return


@pytest.mark.slow
def test_a_prefix_of_a_permutation_passes() -> None:
    right = Mutant("right", "scheduling_policy", lambda: FirstFew, "")
    assert [outcome for outcome in conformance.run_suite(right.subject()) if outcome.result == "failed"] == []


@pytest.mark.parametrize("policy", [PreemptsTheOldest, FailsLate])
def test_a_run_finds_a_wrong_victim(policy: type[ShortestFirst]) -> None:
    wrong = Mutant("wrong", "scheduling_policy", lambda: policy, "")
    (outcome,) = conformance.run_suite(wrong.subject(), only="runs_plain_with_pages_of_1")
    assert outcome.result == "failed" and "asked for a victim" in outcome.message


def test_checks_that_do_not_apply_are_left_out() -> None:
    names = [check.name for check in conformance.checks("scheduling_policy", load_mutants("scheduling_policy").reference.subject())]
    assert "priorities_are_kept" not in names
    assert len(names) == len(set(names))
