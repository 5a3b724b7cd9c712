"""Which blocks of windows and states a match needs, and where it can end."""

from __future__ import annotations

import numpy as np

from frame.core.interfaces.cache_groups import PagePool
from frame.kv_tiers.block_layout import BlockLayout, derive_key
from frame.kv_tiers.group_blocks import GroupBlocks, find_groups
from tests.core.scheduling.grouped_rig import GroupedRig
from tests.core.scheduling.small_rig import config, policy

POOLS = [PagePool("window", 40, 4, 9), PagePool("snapshot", 6, 0)]  # a window of 3 pages
KEYS = [bytes([number]) * 32 for number in range(12)]
LAYOUT = BlockLayout(8, (1, 2, 3), (65, 40, 6))


def make_groups() -> GroupBlocks:
    groups = find_groups(GroupedRig(POOLS, config(), policy()).scheduler._running.kv_manager, LAYOUT)
    assert groups is not None
    return groups


def test_keys_and_numbers_have_the_same_order() -> None:
    groups = make_groups()
    keys = groups.list_keys(KEYS, 0, 5)
    assert len(keys) == len(set(keys)) == 3 * 2 + 3
    assert keys[:3] == [derive_key(key, 1, 0) for key in KEYS[2:5]]
    pages = [np.array([65 + 7, 65 + 8, 65 + 9]), np.array([65 + 40 + 5])]
    parts, places = LAYOUT.locate(groups.number_pages(pages))
    assert parts.tolist() == [1, 1, 1, 2, 2, 2, 3, 4, 5]
    assert places.tolist() == [7, 8, 9, 7, 8, 9, 5, 5, 5]
    assert LAYOUT.locate(np.array([0, 64]))[0].tolist() == [0, 0]
    assert groups.count_pages(0, 5) == [3, 1]
    assert groups.count_pages(4, 5) == [1, 1], "the window before is on the device"


def test_a_match_ends_where_all_blocks_are_held() -> None:
    groups = make_groups()
    held = {*groups.list_keys(KEYS, 0, 4), *groups.list_keys(KEYS, 0, 9)}
    assert groups.find_end(KEYS, 0, 12, held.__contains__) == 9
    held.discard(derive_key(KEYS[8], 2, 2))  # the last piece of a state
    assert groups.find_end(KEYS, 0, 12, held.__contains__) == 4
    assert groups.find_end(KEYS, 5, 12, held.__contains__) == 5
    held.discard(derive_key(KEYS[1], 1, 1))  # of the window
    assert groups.find_end(KEYS, 0, 12, held.__contains__) == 0
    assert groups.find_end(KEYS, 2, 12, held.__contains__) == 4, "the device has the window before page 2"
