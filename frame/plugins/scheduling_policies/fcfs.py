"""`fcfs`: first come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy


class Fcfs(SchedulingPolicy):
    """Keeps the order of arrival."""

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return waiting
