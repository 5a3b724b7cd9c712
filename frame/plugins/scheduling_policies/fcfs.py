"""`fcfs`: first come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class Fcfs(SchedulingPolicy):
    """Keeps the order of arrival."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return waiting
