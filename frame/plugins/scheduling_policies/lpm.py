"""`lpm`: longest prefix match first, which uses cached prefixes before they are evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy, late_first

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class LongestPrefixMatch(SchedulingPolicy):
    """The request with most cached tokens first; on a tie the oldest. Requests past the waiting
    limit come first."""

    needs_matches: ClassVar[bool] = True

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return late_first(sorted(waiting, key=_cached_tokens, reverse=True), view)


def _cached_tokens(request: Request) -> int:
    return request.match.num_tokens if request.match is not None else 0
