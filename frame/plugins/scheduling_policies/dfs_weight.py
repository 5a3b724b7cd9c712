"""`dfs-weight`: visits the tree of cached prefixes depth first, the branch with most waiting
requests first.

Requests that share a prefix run one after the other, while it is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy, late_first


class DepthFirstByWeight(SchedulingPolicy):
    """Groups by shared cached pages: the largest group first, longer shared prefixes before those
    that end at a branch, requests without a cached prefix last; on a tie the oldest. Requests past
    the waiting limit come first.

    Prefixes share their first n pages exactly if these are the same pages, so the pages define the
    tree.
    """

    needs_matches: ClassVar[bool] = True
    conformance_orders: ClassVar[tuple[Any, ...]] = (
        # the larger group first; in it longer common prefixes before one that ends at a branch
        (({"pages": (1,)}, {"pages": (2, 3)}, {"pages": (2,)}, {"pages": (2, 3)}, {}), (1, 3, 2, 0, 4)),
        # branches of any depth, after common prefixes of several pages
        (({"pages": (1, 2, 3, 4)}, {"pages": (1, 2, 3, 5, 6)}, {"pages": (1, 2, 3, 5, 7)}, {"pages": (1, 2)}), (1, 2, 0, 3)),
        (({"pages": (9, 1)}, {"pages": (8, 1)}, {"pages": (9, 2)}, {"pages": (8, 1)}), (0, 2, 1, 3)),
        (({"pages": (1, 2)}, {"pages": (1, 3)}, {"pages": (1, 2)}), (0, 2, 1)),
        (({"pages": (1, 2, 9)}, {"pages": (1, 3, 8)}, {"pages": (1, 4, 9)}), (0, 1, 2)),
        (({"pages": None}, {"pages": (1,)}, {"pages": None}, {"pages": ()}), (1, 0, 2, 3)),
        (({"pages": (1,)}, {"pages": (2,), "waited": 60.0}), (1, 0)),
    )

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        ordered: list[SchedulableRequest] = []
        _visit([(_pages(request), request) for request in waiting], 0, ordered)
        return late_first(ordered, view)


def _visit(group: list[tuple[np.ndarray, SchedulableRequest]], depth: int, ordered: list[SchedulableRequest]) -> None:
    """Append the requests of a group that shares its first `depth` pages."""
    branches: dict[int, list[tuple[np.ndarray, SchedulableRequest]]] = {}
    ending = []
    for pages, request in group:
        if len(pages) == depth:
            ending.append(request)
        else:
            branches.setdefault(int(pages[depth]), []).append((pages, request))
    for branch in sorted(branches.values(), key=len, reverse=True):
        _visit(branch, _shared([pages for pages, _ in branch], depth + 1), ordered)
    ordered.extend(ending)


def _shared(rows: list[np.ndarray], min_shared: int) -> int:
    """The number of leading pages that all rows share."""
    first, shared = rows[0], min(len(row) for row in rows)
    for row in rows[1:]:
        differs = row[min_shared:shared] != first[min_shared:shared]
        if differs.any():
            shared = min_shared + int(differs.argmax())
    return shared


def _pages(request: SchedulableRequest) -> np.ndarray:
    return request.match.pages if request.match is not None else np.empty(0, np.int32)
