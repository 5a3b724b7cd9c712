"""Sums by copies, on threads with the memory and the signals of two ranks. Operations run when they
are enqueued, which is the earliest that the streams of a GPU allow."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
import torch

from frame.plugins.collectives import peer_copies

SLOT = 64  # bytes


class Handle:
    """One rank's view of the shared memory. A slow rank adds a piece late."""

    def __init__(self, rank: int, memories: list[torch.Tensor], signals: list[list[threading.Semaphore]], delay: float) -> None:
        self.rank, self.memories, self.signals, self.delay = rank, memories, signals, delay

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.memories[rank].view(dtype).view(shape)

    def put_signal(self, rank: int, channel: int) -> None:
        assert rank == 1 - self.rank
        self.signals[rank][channel].release()

    def wait_signal(self, rank: int, channel: int) -> None:
        assert rank == 1 - self.rank
        assert self.signals[self.rank][channel].acquire(timeout=10)
        time.sleep(self.delay)


@pytest.mark.parametrize("delays", [(0.0, 0.002), (0.002, 0.0)])
def test_calls_in_a_row_sum_tensors_of_any_number_of_pieces(delays: tuple[float, float]) -> None:
    platform = MagicMock()  # streams whose operations have ended when they are enqueued
    memories = [torch.zeros(SLOT * peer_copies.SLOTS, dtype=torch.uint8) for _ in range(2)]
    signals = [[threading.Semaphore(0) for _ in range(peer_copies.SLOTS)] for _ in range(2)]
    numbers = torch.Generator().manual_seed(1)
    counts = ((5, 1), (32, 1), (33, 2), (32 * 9 + 7, 2), (1, 1), (32 * 8, 1), (32 * 24, 1), (32 * 26, 2), (32 * 3, 3))
    calls = [(torch.randn(2, count, generator=numbers).to(torch.bfloat16), parts) for count, parts in counts]

    def act(rank: int) -> list[torch.Tensor]:
        copies = peer_copies.PeerCopies(Handle(rank, memories, signals, delays[rank]), rank, platform, SLOT)
        return [copies.sum(x[rank].chunk(parts), torch.empty_like(x[rank])) for x, parts in calls]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(act, range(2)))
    for (x, _), *sums in zip(calls, *found, strict=True):
        expected = x.float().sum(0).to(x.dtype)
        assert all(torch.equal(each, expected) for each in sums)
