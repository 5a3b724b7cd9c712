"""`lof`: longest output first, which avoids a tail of single long requests at the end of a batch
job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy, late_first

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class LongestOutputFirst(SchedulingPolicy):
    """The request with most remaining output tokens first; on a tie the oldest. Requests past the
    waiting limit come first."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return late_first(sorted(waiting, key=_remaining, reverse=True), view)


def _remaining(request: Request) -> int:
    return request.max_new_tokens - request.output_len
