"""`priority`: highest request priority first; a waiting request preempts running requests of lower
priority."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class PriorityFirst(SchedulingPolicy):
    """Higher `priority` first; on a tie the oldest. A waiting request preempts a running one of
    lower priority."""

    by_priority: ClassVar[bool] = True

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return sorted(waiting, key=attrgetter("priority"), reverse=True)

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        """The newest request of the lowest priority, never the oldest of all requests."""
        return min(reversed(running[1:]), key=attrgetter("priority"), default=None)

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.priority > running.priority
