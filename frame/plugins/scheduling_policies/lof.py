"""`lof`: longest output first. Long answers started early leave no tail of lone requests at the end of a batch job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy

if TYPE_CHECKING:
    from frame.core.request import Request


class LongestOutputFirst(SchedulingPolicy):
    """The request that may yet produce most tokens first; among equals the oldest."""

    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return sorted(waiting, key=_remaining, reverse=True)


def _remaining(request: Request) -> int:
    return request.max_new_tokens - request.output_len
