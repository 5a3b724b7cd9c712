"""Split schedules of the `triton` backend: every key of every row is in exactly one item or shared
item.

Interpreted, so `test_triton.py` runs this file in its own process.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by tests/kernels/test_interpreted.py"),
]


def items_of(lengths, config, groups=()):  # type: ignore[no-untyped-def]
    """(items [n, 8], shared items, rows [n, 8]) of a schedule. `groups`: (rows, shared keys), from
    the first row on."""
    from frame.attention_backends.triton.split_schedule import HEADER, ITEM, ROW

    rows, found = len(lengths), find_schedule(lengths, config, groups)
    info = found[HEADER.value :][: config.capacity * ROW.value].reshape(-1, ROW.value)[:rows]
    items = found[HEADER.value + config.capacity * ROW.value :][: config.count_items(config.capacity) * ITEM.value].reshape(-1, ITEM.value)
    assert found[0] <= config.count_items(rows), "more items than the grid has room for"
    assert (found[len(found) - config.capacity * config.blocks :][: rows * config.blocks] == 0).all()
    return items[: found[0]], int(found[1]), info


def find_schedule(lengths, config, groups=()):  # type: ignore[no-untyped-def]
    from frame.attention_backends.triton.shared_prefixes import FIELDS
    from frame.attention_backends.triton.split_schedule import make_schedule

    rows = len(lengths)
    prefixes = torch.zeros(FIELDS, config.capacity, dtype=torch.int32)
    at = 0
    for size, shared in groups:
        there = torch.arange(at, at + size, dtype=torch.int32)
        prefixes[0, at : at + size] = shared
        prefixes[1, at : at + size] = there
        prefixes[2, at : at + size] = there - at
        prefixes[3, at : at + size] = size
        prefixes[4, at : at + size] = there
        at += size
    slots = torch.arange(rows) + 5
    return make_schedule(config, rows, torch.tensor(lengths, dtype=torch.int32), slots, prefixes, pdl=False).numpy()


def make_config(**values):  # type: ignore[no-untyped-def]
    from frame.attention_backends.triton.split_schedule import SplitConfig

    return SplitConfig(
        **{"capacity": 300, "heads": 4, "blocks": 4, "target": 33, "min_keys": 64, "block_keys": 64, "window": 0, "tile_rows": 0, **values}
    )


@pytest.mark.parametrize("lengths", [[1], [512], [100_000], [7, 3000, 64, 65, 1], [1000] * 256, [50_000, *[10] * 100]])
@pytest.mark.parametrize("window", [0, 128])
def test_suffix_items_hold_every_key_once(lengths: list[int], window: int) -> None:
    items, shared, info = items_of(lengths, make_config(window=window))
    assert shared == 0
    max_length = 0
    for row, length in enumerate(lengths):
        own = items[info[row, 0] : info[row, 0] + info[row, 1]]
        assert (own[:, 0] == row).all()
        assert (own[:, 1] == row + 5).all()
        first = max(0, length - window) if window else 0
        assert own[0, 2] == first
        assert own[-1, 3] == length
        assert (own[1:, 2] == own[:-1, 3]).all()
        assert (own[:, 3] > own[:, 2]).all()
        max_length = max(max_length, int((own[:, 3] - own[:, 2]).max()))
    total = sum(min(length, window) if window else length for length in lengths)
    assert max_length <= max(64, 1.25 * total / 33) + 64


@pytest.mark.parametrize("lengths", [[1], [0, 512, 0], [100_000], [7, 3000, 64, 65, 1], [1000] * 256, [50_000, *[10] * 100]])
@pytest.mark.parametrize("shares", [1, 33, 132])
def test_shares_cost_the_same(lengths: list[int], shares: int) -> None:
    from frame.attention_backends.triton.split_schedule import HEADER, MAX_PIECES, ROW_COST

    items, _, info = items_of(lengths, config := make_config(min_keys=128, shares=shares))
    for row, length in enumerate(lengths):
        own = items[info[row, 0] : info[row, 0] + info[row, 1]]
        assert (own[:, 0] == row).all()
        assert (own[:, 3] > own[:, 2]).all()
        assert [*own[:, 2], length] == [0, *own[:, 3]]
    used = find_schedule(lengths, config)[HEADER.value - 6]
    firsts = [*items[:used, 4], len(items)]
    assert firsts[0] == 0
    row_cost = ROW_COST.value if 2 * len(lengths) > shares else 0
    costs = [sum(-(-(end - begin) // 64) + row_cost for begin, end in items[a:b, 2:4]) for a, b in pairwise(firsts)]
    total = sum(-(-length // 64) + row_cost for length in lengths if length)
    assert len(costs) == used <= shares
    assert min(costs) > 0
    minimum = max(2, -(-max(lengths) // 64 // MAX_PIECES.value) + 1)
    assert max(costs) <= max(minimum + row_cost, -(-total // shares)) + row_cost
    assert info[:, 1].max() <= MAX_PIECES.value + 1


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_few_rows_take_one_wave_of_programs(rows: int) -> None:
    config = make_config()
    items, _, _ = items_of([16_000 + row for row in range(rows)], config)
    assert config.count_items(rows) == config.target
    assert 0.45 * config.target < len(items) <= config.target


def test_many_similar_rows_are_not_split() -> None:
    items, _, _ = items_of([1000 + row for row in range(64)], make_config())
    assert len(items) == 64


def test_a_long_row_takes_the_whole_device() -> None:
    items, _, _ = items_of([50_000, *[10] * 100], make_config())
    assert len(items) >= 100 + 26


def test_shared_items_hold_a_prefix_once_for_each_tile_of_rows() -> None:
    lengths = [700, 650, 641, 900, 660, 20, 3000, 2100, 2049]
    items, shared, info = items_of(lengths, make_config(tile_rows=2, target=9), groups=((5, 640), (1, 0), (3, 2048)))
    for row, (prefix, tile, within, rows) in enumerate(
        [
            (640, 0, 0, 2),
            (640, 0, 1, 2),
            (640, 2, 0, 2),
            (640, 2, 1, 2),
            (640, 4, 0, 1),
            (0, 0, 0, 0),
            (2048, 6, 0, 2),
            (2048, 6, 1, 2),
            (2048, 8, 0, 1),
        ]
    ):
        own = items[shared + info[row, 0] :][: info[row, 1]]
        assert (own[0, 2], own[-1, 3]) == (prefix, lengths[row])
        if not prefix:
            assert info[row, 3] == 0
            continue
        parts = items[info[row, 2] : info[row, 2] + info[row, 3]]
        assert info[row, 2] + info[row, 3] <= shared
        assert (parts[:, 0] == tile).all()
        assert (parts[:, 4] == rows).all()
        assert info[row, 4] == within
        assert (parts[0, 2], parts[-1, 3]) == (0, prefix)
        assert (parts[1:, 2] == parts[:-1, 3]).all()
    assert int(np.sum(info[[0, 2, 4, 6, 8], 3])) == shared


def test_tokens_of_a_draft_are_one_row() -> None:
    from frame.attention_backends.triton.split_schedule import HEADER, ITEM, ROW, make_schedule

    config = make_config(tokens=4)
    lengths, slots = [50, 51, 52, 9, 7, 8, 9, 10, 11, 12, 3, 1, 1], [5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7, 9, 9]
    prefixes = torch.zeros(5, config.capacity, dtype=torch.int32)
    found = make_schedule(config, 13, torch.tensor(lengths, dtype=torch.int32), torch.tensor(slots), prefixes, pdl=False).numpy()
    items = found[HEADER.value + config.capacity * ROW.value :][: found[0] * ITEM.value].reshape(-1, ITEM.value)
    # (first row, request slot, end, tokens, position of the first)
    expected = [(0, 5, 52, 3, 49), (3, 5, 9, 1, 8), (4, 6, 10, 4, 6), (8, 6, 12, 2, 10), (10, 7, 3, 1, 2)]
    expected += [(11, 9, 1, 1, 0), (12, 9, 1, 1, 0)]
    assert sorted(map(tuple, items[:, [0, 1, 3, 4, 5]].tolist())) == expected
