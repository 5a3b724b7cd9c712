"""The order of each scheduling policy."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.interfaces.cache import Match
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.request import Request
from frame.plugins.loader import load_registry
from frame.testing.contexts import SCHEDULING
from frame.testing.scheduling.scheduling_policy import VIEW, example_requests

REGISTRY = load_registry(installed=False)


def policy(name: str) -> SchedulingPolicy:
    return REGISTRY.load(REGISTRY.get("scheduling_policy", name))(SCHEDULING)


def indices(name: str, waiting: list[Request], view: SchedulerView = VIEW) -> list[int]:
    return [request.index for request in policy(name).sort_waiting(waiting, view)]


def matching(pages_of_each: list[list[int]]) -> list[Request]:
    requests = example_requests(len(pages_of_each))
    for request, pages in zip(requests, pages_of_each, strict=True):
        request.match = Match(4 * len(pages), np.array(pages, np.int32), None)
    return requests


def test_fcfs() -> None:
    assert indices("fcfs", example_requests(5)) == [0, 1, 2, 3, 4]


def test_lpm() -> None:
    assert indices("lpm", matching([[], [1], [1, 2, 3], [4], [1, 2]])) == [2, 4, 1, 3, 0]


def test_lof_counts_what_is_left() -> None:
    requests = example_requests(4)
    for request, left in zip(requests, (10, 30, 30, 20), strict=True):
        request.max_num_tokens = request.num_tokens + left
    assert indices("lof", requests) == [1, 2, 3, 0]


def test_priority() -> None:
    requests = example_requests(5)
    for request, value in zip(requests, (0, 3, 0, 3, 9), strict=True):
        request.priority = value
    one = policy("priority")
    assert indices("priority", requests) == [4, 1, 3, 0, 2]
    assert one.select_victim(requests, VIEW) is requests[2]
    assert one.select_victim(requests[:1], VIEW) is None
    assert one.can_preempt(requests[1], requests[0])
    assert not one.can_preempt(requests[0], requests[2])


def test_random_is_a_new_order_each_moment_and_the_same_for_the_same() -> None:
    requests = example_requests(40)
    orders = [indices("random", requests, SchedulerView(now, 0, 1, 1, 1, 1)) for now in (1.0, 2.0, 1.0)]
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(
    ("pages", "order"),
    [
        # page 1 leads to three requests, page 8 to two; without a prefix comes last
        ([[], [8], [1, 2], [8, 9], [1, 3], [1, 2]], [2, 5, 4, 3, 1, 0]),
        # equal weights: the branch of the oldest first; what goes deeper goes before what ends
        ([[4], [5], [4, 6], [5, 7]], [2, 0, 3, 1]),
        ([[], [], []], [0, 1, 2]),
        # a long shared stem costs no recursion a page
        ([list(range(1, 5001)), [*range(1, 5000), 9999], list(range(1, 3000))], [0, 1, 2]),
    ],
)
def test_dfs_weight(pages: list[list[int]], order: list[int]) -> None:
    assert indices("dfs-weight", matching(pages)) == order
