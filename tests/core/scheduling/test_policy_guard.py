"""A faulty scheduling policy is logged by name, and requests are still served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import pytest

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.policy_guard import LOG_INTERVAL, GuardedPolicy
from frame.core.scheduling.request import Request
from frame.testing.contexts import SCHEDULING
from frame.testing.scheduler_rig import SchedulerRig
from frame.testing.scheduling.scheduling_policy import VIEW, example_requests
from tests.core.scheduling.small_rig import config, params, prompt


class Faulty(SchedulingPolicy):
    """Orders by the given function."""

    def __init__(self, reply: Callable[[Sequence[Request]], Any]) -> None:
        self._reply = reply

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        reply: Iterable[Request] = self._reply(waiting)
        return reply


def raises(waiting: Sequence[Request]) -> Any:
    raise KeyError("no such weight")


def fails_midway(waiting: Sequence[Request]) -> Iterator[Request]:
    yield waiting[-1]
    raise KeyError("no such weight")


def empties(waiting: Any) -> Any:
    waiting.clear()
    raise KeyError("no such weight")


FOREIGN = example_requests(1, seed=9)[0]
FAILING: dict[str, Callable[[Any], Any]] = {
    "raises": raises,
    "fails midway": fails_midway,
    "empties": empties,
    "returns none": lambda waiting: None,
    "a number": lambda waiting: 3,
}
EXCESSIVE: dict[str, Callable[[Any], Any]] = {
    "doubled": lambda waiting: [*waiting, *waiting],
    "foreign": lambda waiting: [FOREIGN, *waiting],
    "no requests": lambda waiting: [None, 7, *waiting, "x", []],
}


def view(now: float) -> SchedulerView:
    return SchedulerView(now=now, num_running=0, token_budget=32, free_pages=9, evictable_pages=0, page_size=4)


@pytest.mark.parametrize("name", FAILING)
def test_waiting_requests_keep_their_order_when_the_policy_fails(name: str, caplog: pytest.LogCaptureFixture) -> None:
    waiting = example_requests(5)
    expected = [waiting[-1], *waiting[:-1]] if name == "fails midway" else waiting  # its order before the fault is kept
    assert list(GuardedPolicy(Faulty(FAILING[name])).sort_waiting(list(waiting), VIEW)) == expected
    (record,) = caplog.records
    assert "tests.core.scheduling.test_policy_guard.Faulty" in record.getMessage() and "Error" in record.getMessage()
    assert record.levelno == logging.ERROR and record.exc_info is not None and record.exc_info[2] is not None


@pytest.mark.parametrize("name", EXCESSIVE)
def test_duplicate_and_foreign_requests_are_skipped(name: str, caplog: pytest.LogCaptureFixture) -> None:
    waiting = example_requests(5)
    assert list(GuardedPolicy(Faulty(EXCESSIVE[name])).sort_waiting(list(waiting), VIEW)) == waiting
    assert ["skipped" in record.getMessage() for record in caplog.records] == [True]


def test_a_partial_order_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    waiting = example_requests(5)
    assert list(GuardedPolicy(Faulty(lambda window: [window[3], window[0]])).sort_waiting(waiting, VIEW)) == [waiting[3], waiting[0]]
    assert not caplog.records


def test_a_lazy_order_is_read_only_as_far_as_needed() -> None:
    waiting, read = example_requests(5), []

    def lazily(window: Sequence[Request]) -> Iterator[Request]:
        for request in window:
            read.append(request)
            yield request

    ordered = GuardedPolicy(Faulty(lazily)).sort_waiting(waiting, VIEW)
    assert [next(ordered), next(ordered)] == waiting[:2]
    assert read == waiting[:2]


def test_an_endless_order_is_cut() -> None:
    waiting = example_requests(5)
    assert list(GuardedPolicy(Faulty(lambda window: repeat(FOREIGN))).sort_waiting(waiting, VIEW)) == []


def test_repeated_faults_are_logged_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    policy = GuardedPolicy(Faulty(raises))
    for step in range(1000):
        list(policy.sort_waiting([], view(step * LOG_INTERVAL / 400)))
    assert len(caplog.records) == 3


@pytest.mark.parametrize("name", [*FAILING, *EXCESSIVE])
def test_requests_are_served_under_a_faulty_policy(name: str) -> None:
    harness = SchedulerRig(config(max_running=2), Faulty((FAILING | EXCESSIVE)[name]))
    for i in range(8):
        harness.add(prompt(9, i), params(max_tokens=5))
    harness.run()


class FaultyVictim(SchedulingPolicy):
    """Raises when it is asked for a victim or about a preemption."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return waiting

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        raise KeyError("no such weight")

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        raise KeyError("no such weight")


def chooses_the_oldest(running: Sequence[Request]) -> Request | None:
    return running[0]


def chooses_an_unknown_request(running: Sequence[Request]) -> Request | None:
    return FOREIGN


@pytest.mark.parametrize("choose", [chooses_the_oldest, chooses_an_unknown_request, raises])
def test_an_invalid_victim_is_rejected(choose: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    class Chooses(FaultyVictim):
        def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
            found: Request | None = choose(running)
            return found

    assert GuardedPolicy(Chooses(SCHEDULING)).select_victim(example_requests(5), VIEW) is None
    (record,) = caplog.records
    assert "asked for a victim" in record.getMessage()


def test_a_valid_victim_is_used() -> None:
    class Second(FaultyVictim):
        def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
            return running[1]

        def can_preempt(self, waiting: Request, running: Request) -> bool:
            return waiting is not running

    running = example_requests(5)
    policy = GuardedPolicy(Second(SCHEDULING))
    assert policy.select_victim(running, VIEW) is running[1]
    assert policy.may_preempt and policy.can_preempt(FOREIGN, running[0], 0.0) and not policy.can_preempt(FOREIGN, FOREIGN, 0.0)


def test_requests_are_served_when_pages_run_out_and_the_policy_fails(caplog: pytest.LogCaptureFixture) -> None:
    harness = SchedulerRig(config(num_pages=11, max_context=40, max_running=3), FaultyVictim(SCHEDULING))
    for i in range(6):
        harness.add(prompt(8, i), params(max_tokens=28))
    harness.run()
    assert harness.scheduler.get_load()["preempted"] > 0
    assert "FaultyVictim" in caplog.records[0].getMessage()
