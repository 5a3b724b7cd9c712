"""`lpm`: longest prefix match first, which uses cached prefixes before they are evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy, late_first


class LongestPrefixMatch(SchedulingPolicy):
    """The request with most cached tokens first; on a tie the oldest. Requests past the waiting
    limit come first."""

    needs_matches: ClassVar[bool] = True
    conformance_orders: ClassVar[tuple[Any, ...]] = (
        (({"pages": (1,)}, {}, {"pages": (2, 3)}, {"pages": (4,)}), (2, 0, 3, 1)),
        (({"pages": ()}, {"pages": None}), (0, 1)),
        (({"pages": (1,)}, {"waited": 60.0}), (1, 0)),
    )

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return late_first(sorted(waiting, key=_cached_tokens, reverse=True), view)


def _cached_tokens(request: SchedulableRequest) -> int:
    return request.match.num_tokens if request.match is not None else 0
