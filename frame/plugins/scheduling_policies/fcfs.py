"""`fcfs`: first come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy


class Fcfs(SchedulingPolicy):
    """Keeps the order of arrival."""

    conformance_orders: ClassVar[tuple[Any, ...]] = ((({}, {"prompt_len": 4, "priority": 2}, {"pages": (1,)}), (0, 1, 2)),)

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return waiting
