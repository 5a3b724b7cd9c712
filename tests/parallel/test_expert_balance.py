"""The load balancer of experts: DeepSeek's published example, and what holds for any load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frame.parallel.expert_balance import balance_experts, find_imbalance, pack, replicate

LOAD = np.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]])


def test_the_published_example() -> None:
    placed = balance_experts(LOAD, num_physical=16, num_ranks=8, num_groups=4, num_hosts=2)
    assert placed.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@given(st.lists(st.integers(0, 10**6), min_size=8, max_size=8), st.integers(0, 2))
def test_every_expert_has_a_place(load: list[int], more: int) -> None:
    placed = balance_experts(np.array([load]), 8 + 4 * more, 4)
    assert set(placed[0]) == set(range(8)) and placed.shape == (1, 8 + 4 * more)


def test_replicas_make_ranks_equal() -> None:
    even = np.arange(8).reshape(1, 8)
    load = np.array([[800, 10, 10, 10, 10, 10, 10, 10]])
    assert find_imbalance(load, even, 4)[0] > 3
    assert find_imbalance(load, balance_experts(load, 16, 4), 4)[0] < 1.3  # nine replicas on four ranks
    assert find_imbalance(np.ones((1, 8)), even, 4)[0] == 1


def test_parts() -> None:
    assert pack(np.array([5.0, 1.0, 4.0, 2.0]), 2).tolist() == [[0, 1], [2, 3]]
    replicas, counts = replicate(np.array([6.0, 1.0]), 4)
    assert (replicas.tolist(), counts.tolist()) == ([0, 1, 0, 0], [3, 1])


def test_numbers_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="10 physical experts cannot be divided by 4"):
        balance_experts(np.ones((1, 8)), 10, 4)
    with pytest.raises(ValueError, match="4 physical experts cannot hold 8"):
        balance_experts(np.ones((1, 8)), 4, 4)
