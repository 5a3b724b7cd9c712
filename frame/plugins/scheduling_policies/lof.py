"""`lof`: longest output first, which avoids a tail of single long requests at the end of a batch
job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy, late_first


class LongestOutputFirst(SchedulingPolicy):
    """The request with most remaining output tokens first; on a tie the oldest. Requests past the
    waiting limit come first."""

    conformance_orders: ClassVar[tuple[Any, ...]] = (
        (({"max_new_tokens": 5}, {"max_new_tokens": 9}, {"max_new_tokens": 12, "output_len": 8}, {"max_new_tokens": 9}), (1, 3, 0, 2)),
        (({"max_new_tokens": 9}, {"max_new_tokens": 5, "waited": 60.0}), (1, 0)),
    )

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return late_first(sorted(waiting, key=_remaining, reverse=True), view)


def _remaining(request: SchedulableRequest) -> int:
    return request.max_new_tokens - request.output_len
