"""The mover: bytes of all tensors after a round trip, pieces, buffers of several tiers, and copies
that fail; in `poll` and in a thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frame.core.interfaces.platform import HOST, PlatformContext
from frame.kv_tiers.mover import PoolBlockMover
from tests.kv_tiers.mover_rig import CASES, check_round_trip, list_bytes, make_buffers, make_pool, wait_for
from tests.plugins.fake_platform import FakePlatform

PLATFORMS = {"poll": HOST, "thread": FakePlatform(PlatformContext())}


@pytest.mark.parametrize("way", PLATFORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_round_trip_keeps_every_byte(case, page_size, way):
    pool = make_pool(case, page_size, 12)
    page_bytes = sum(tensor.shape[1] for tensor in list_bytes(pool))

    @settings(max_examples=8, deadline=None)
    @given(st.permutations(range(12)), st.integers(0, 6), st.sampled_from([1, 3 * page_bytes, 1 << 20]))
    def check(order, count, staging):
        mover = PoolBlockMover(pool, PLATFORMS[way], staging)
        assert page_bytes <= mover.block_bytes < page_bytes + 8
        try:
            check_round_trip(pool, mover, order[:count], order[6 : 6 + count])
        finally:
            mover.close()

    check()


def test_only_buffers_that_tiers_want_are_filled():
    pool = make_pool("uniform", 4, 9)
    mover = PoolBlockMover(pool, HOST)
    first, second = make_buffers(mover, 3), make_buffers(mover, 3)
    mover.store(5, np.array([8, 3, 4], np.int32), [[first[0], None, None], [None, None, second[2]]])
    wait_for(mover, [5])
    assert first[0].any()
    assert second[2].any()
    assert not any(buffer.any() for buffer in (*first[1:], *second[:2]))
    mover.store(6, np.array([8], np.int32), [[None]])
    wait_for(mover, [6])


def test_a_call_of_poll_copies_one_piece_and_loads_go_first():
    pool = make_pool("uniform", 4, 9)
    mover = PoolBlockMover(pool, HOST, 1)  # a piece is a block
    mover.store(1, np.array([1, 2, 3], np.int32), [make_buffers(mover, 3)])
    assert mover.poll() == []
    mover.load(2, np.array([4, 5], np.int32), make_buffers(mover, 2))
    assert [mover.poll() for _ in range(5)] == [[], [2], [], [1], []]


@pytest.mark.parametrize("way", PLATFORMS)
def test_a_failed_copy_raises_in_poll(way):
    pool = make_pool("uniform", 4, 9)
    mover = PoolBlockMover(pool, PLATFORMS[way])
    mover.load(1, np.array([1], np.int32), [torch.zeros(3, dtype=torch.uint8)])
    with pytest.raises(RuntimeError, match="size"):
        wait_for(mover, [1])
    mover.close()
    assert not any(thread.name == "kv-tier-copies" for thread in threading.enumerate())


def test_pages_and_blocks_must_be_as_many():
    mover = PoolBlockMover(make_pool("mla", 4, 9), HOST)
    with pytest.raises(ValueError, match="2 pages have 1 blocks"):
        mover.load(1, np.array([1, 2], np.int32), make_buffers(mover, 1))


def test_stores_of_committed_pages_do_not_wait_for_the_step_in_flight(monkeypatch):
    """Loads do."""
    pool, platform, waited = make_pool("uniform", 4, 9), FakePlatform(PlatformContext()), []
    mover = PoolBlockMover(pool, platform, waits_for_steps=False)
    monkeypatch.setattr(mover._thread.stream, "wait_event", waited.append, raising=False)
    mover.store(1, np.array([1], np.int32), [make_buffers(mover, 1)])
    wait_for(mover, [1])
    assert not waited
    mover.load(2, np.array([2], np.int32), make_buffers(mover, 1))
    wait_for(mover, [2])
    assert len(waited) == 1
    mover.close()
