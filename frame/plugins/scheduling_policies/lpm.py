"""`lpm`: longest prefix match first, which uses cached prefixes before they are evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy, late_first


class LongestPrefixMatch(SchedulingPolicy):
    """The request with most cached tokens first; on a tie the oldest. Requests past the waiting
    limit come first."""

    needs_matches: ClassVar[bool] = True

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return late_first(sorted(waiting, key=_cached_tokens, reverse=True), view)


def _cached_tokens(request: SchedulableRequest) -> int:
    return request.match.num_tokens if request.match is not None else 0
