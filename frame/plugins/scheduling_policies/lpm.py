"""`lpm`: longest prefix match first, so that what is cached is used before it is evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy, late_first

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class LongestPrefixMatch(SchedulingPolicy):
    """The request with most cached tokens first; among equals the oldest. Who has waited too long goes before all."""

    needs_matches: ClassVar[bool] = True

    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return late_first(sorted(waiting, key=_cached_tokens, reverse=True), view)


def _cached_tokens(request: Request) -> int:
    return request.match.num_tokens if request.match is not None else 0
