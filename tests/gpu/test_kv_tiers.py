"""The mover of KV tiers on a GPU: its kernel, round trips beside steps on another stream, and many
pages; memory that is page-locked after it was mapped."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch

from frame.core.interfaces.platform import PlatformContext
from frame.host.kept_memory import KeptMemory, create_memory, get_path
from frame.kv_tiers.mover import PoolBlockMover
from tests.kv_tiers.mover_rig import CASES, check_round_trip, list_bytes, make_buffers, make_pool, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame.plugins.platforms.cuda import CudaPlatform
    from tests.kernels.block_checksums import *  # noqa: F403
    from tests.kernels.page_blocks import *  # noqa: F403

    PLATFORM = CudaPlatform(PlatformContext())
MANY = 70_000


def pinned(mover: PoolBlockMover, count: int) -> list[torch.Tensor]:
    return [buffer.pin_memory() for buffer in make_buffers(mover, count)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_round_trip_keeps_every_byte(case, page_size):
    pool = make_pool(case, page_size, 40, PLATFORM.device)
    mover = PoolBlockMover(pool, PLATFORM, 5 * 16 * 64)
    check_round_trip(pool, mover, range(0, 40, 2), range(1, 41, 2))
    mover.close()


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_buffers_on_the_device_are_not_staged(devices):
    """Of one tier or of both; loads read the second one's."""
    pool = make_pool("int8", 16, 40, PLATFORM.device)
    mover = PoolBlockMover(pool, PLATFORM, 5 * 16 * 64)
    check_round_trip(pool, mover, range(0, 40, 2), range(1, 41, 2), devices)
    mover.close()


def test_copies_follow_the_steps_that_are_launched():
    """A store has what a slow step writes, and a load is not overwritten by it."""
    pool = make_pool("uniform", 16, 64, PLATFORM.device)
    mover = PoolBlockMover(pool, PLATFORM)
    pages = np.arange(1, 32, dtype=np.int32)
    for value in range(1, 6):
        stored = pinned(mover, 31)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            for tensor in list_bytes(pool):
                tensor.fill_(value)
            mover.store(1, pages, [stored])
            mover.load(2, pages + 31, [torch.full_like(each, 100 + value).pin_memory() for each in stored])
        wait_for(mover, [1, 2])
        for tensor in list_bytes(pool):
            assert bool((tensor[32:63] == 100 + value).all())
        width = sum(tensor.shape[1] for tensor in list_bytes(pool))
        assert all(bool((each[:width] == value).all()) for each in stored)
    mover.close()


def test_stores_of_committed_pages_do_not_wait_for_the_step_in_flight():
    pool = make_pool("uniform", 16, 64, PLATFORM.device)
    mover = PoolBlockMover(pool, PLATFORM, waits_for_steps=False)
    pages, step = np.arange(1, 32, dtype=np.int32), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    step.record()
    mover.store(1, pages, [make_buffers(mover, 31, "cuda")])
    wait_for(mover, [1])
    assert not step.query()
    mover.load(2, pages + 31, make_buffers(mover, 31, "cuda"))
    wait_for(mover, [2])
    assert step.query()
    mover.close()


def test_pages_beyond_two_bytes():
    pool = make_pool("mla", 1, MANY, PLATFORM.device)
    mover = PoolBlockMover(pool, PLATFORM)
    check_round_trip(pool, mover, range(MANY - 2000, MANY), range(1, 2001))
    mover.close()


def test_a_large_job_reaches_the_rate_of_the_link():
    """A piece of the copies is in flight while the thread prepares the next one. The bound is half
    of a plain copy's rate, since other jobs may use the link."""
    pool = make_pool("uniform", 4096, 65, PLATFORM.device)
    mover = PoolBlockMover(pool, PLATFORM)
    pages, buffers = np.arange(1, 65, dtype=np.int32), pinned(mover, 64)
    plain = torch.zeros(64 * mover.block_bytes, dtype=torch.uint8).pin_memory()
    device = torch.zeros_like(plain, device=PLATFORM.device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        plain.copy_(device, non_blocking=True)
        end.record()
        end.synchronize()
    seconds = []
    for job in range(4):
        began = time.perf_counter()
        mover.store(job, pages, [buffers])
        wait_for(mover, [job])
        seconds.append(time.perf_counter() - began)
    mover.close()
    assert min(seconds) <= 2 * start.elapsed_time(end) / 1e3 + 0.002


def test_mapped_memory_is_page_locked():
    """That of the tier `host`, which outlives the engine."""
    descriptor = create_memory()
    assert descriptor is not None
    memory = torch.from_numpy(KeptMemory(get_path(descriptor)).map(1 << 20))
    os.close(descriptor)
    assert not memory.is_pinned()
    PLATFORM.pin_memory(memory)
    assert memory.is_pinned()
    memory.fill_(7)
    assert (memory.to(PLATFORM.device, non_blocking=True) == 7).all()
