"""`priority`: highest request priority first; a waiting request preempts running requests of lower
priority."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy


class PriorityFirst(SchedulingPolicy):
    """Higher `priority` first; on a tie the oldest. A waiting request preempts a running one of
    lower priority."""

    by_priority: ClassVar[bool] = True
    conformance_orders: ClassVar[tuple[Any, ...]] = ((({}, {"priority": 2}, {"priority": -1}, {"priority": 2}), (1, 3, 0, 2)),)

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return sorted(waiting, key=attrgetter("priority"), reverse=True)

    def select_victim(self, running: Sequence[SchedulableRequest], view: SchedulerView) -> SchedulableRequest | None:
        """The newest request of the lowest priority, never the oldest of all requests."""
        return min(reversed(running[1:]), key=attrgetter("priority"), default=None)

    def can_preempt(self, waiting: SchedulableRequest, running: SchedulableRequest) -> bool:
        return waiting.priority > running.priority
