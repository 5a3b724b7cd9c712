"""Scheduling policies: earliest deadline first, and policies with a bug each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from pydantic import BaseModel

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingContext, SchedulingPolicy, late_first
from tests.testing.held_out import Wrong


class EarliestDeadline(SchedulingPolicy):
    """The request whose deadline is nearest comes first; of equal ones the first that came."""

    def __init__(self, context: SchedulingContext, options: BaseModel | None = None) -> None:
        self.context = context

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return late_first(sorted(waiting, key=lambda request: (request.deadline, request.index)), view)

    def select_victim(self, running: Sequence[SchedulableRequest], view: SchedulerView) -> SchedulableRequest | None:
        return max(running[1:], key=lambda request: (request.deadline, request.index), default=None)


TWIN = EarliestDeadline
WRONG = Wrong()


@WRONG.add("Long prompts never start while short ones keep coming: the shortest is first, however long another one has waited.")
class ShortestWithoutAge(EarliestDeadline):
    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return sorted(waiting, key=lambda request: request.prompt_len)


@WRONG.add("The queue is reordered for good, so that requests overtake others in later steps: the window is sorted in place.")
class SortsInPlace(EarliestDeadline):
    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        if isinstance(waiting, list):
            waiting.sort(key=lambda request: (request.deadline, request.index))
            return waiting
        return super().sort_waiting(waiting, view)


@WRONG.add("Requests that come in the same moment, such as the prompts of a batch, wait until others are gone: one of them is kept.")
class ByArrival(EarliestDeadline):
    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        unique = {(request.arrival, request.prompt_len): request for request in waiting}
        return late_first([unique[key] for key in sorted(unique)], view)


@WRONG.add("No request makes progress when pages run out: the one with most tokens is preempted, also where it is the oldest.")
class PreemptsLargest(EarliestDeadline):
    def select_victim(self, running: Sequence[SchedulableRequest], view: SchedulerView) -> SchedulableRequest | None:
        return max(running, key=lambda request: request.num_tokens) if len(running) > 1 else None


@WRONG.add("Two requests of one priority preempt each other forever: equal priority suffices.")
class PreemptsEquals(EarliestDeadline):
    by_priority: ClassVar[bool] = True

    def can_preempt(self, waiting: SchedulableRequest, running: SchedulableRequest) -> bool:
        return waiting.priority >= running.priority


@WRONG.add("Steps wait for the policy when the queue is long: the place of each request is searched in the window.")
class SearchesIndex(EarliestDeadline):
    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        window = list(waiting)
        rids = [request.rid for request in window]
        return late_first(sorted(window, key=lambda request: (request.deadline, rids.index(request.rid))), view)


@WRONG.add("The engine's memory grows with each request: first seen times are kept by request id and never dropped.")
class KeepsSeen(EarliestDeadline):
    def __init__(self, context: SchedulingContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._seen: dict[str, float] = {}

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        for request in waiting:
            self._seen.setdefault(request.rid, view.now)
        return late_first(sorted(waiting, key=lambda request: (request.deadline, self._seen[request.rid])), view)


@WRONG.add("Requests are ordered by the length of others: lengths are remembered by address, which later requests use again.")
class RemembersByAddress(EarliestDeadline):
    def __init__(self, context: SchedulingContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._costs: dict[int, int] = {}

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        if len(self._costs) > 10_000:
            self._costs.clear()
        return late_first(sorted(waiting, key=lambda each: (self._costs.setdefault(id(each), each.num_tokens), each.index)), view)


@WRONG.add("After a burst the window is served in the order of an earlier step: the sorted list is kept while its length is the same.")
class KeepsOrder(EarliestDeadline):
    def __init__(self, context: SchedulingContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._order: list[SchedulableRequest] = []

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        if len(waiting) != len(self._order) or len(waiting) < 8:
            self._order = list(super().sort_waiting(waiting, view))
        return list(self._order)
