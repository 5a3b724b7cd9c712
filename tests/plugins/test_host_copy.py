"""The host's copy of memory that a sleep keeps, with pieces of a few bytes and a device that is the
host."""

from __future__ import annotations

import threading

import pytest
import torch

from frame.host.host_memory import allocate_pages
from frame.plugins.platforms.host_copy import HostCopy

PIECE = 4096


def make_blocks(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("sizes", [(1,), (PIECE,), (PIECE - 1, 2, 3 * PIECE + 5, 0, 7), (10 * PIECE,), ()])
def test_values_come_back(sizes: tuple[int, ...]) -> None:
    blocks, pinned = make_blocks(*sizes), list[int]()
    before = [block.clone() for block in blocks]
    copy = HostCopy(lambda piece: pinned.append(piece.numel()), PIECE)
    for _ in range(2):
        copy.save(blocks)
        for block in blocks:
            block.fill_(7)
        copy.restore()
        assert all(map(torch.equal, blocks, before))
    assert pinned == [PIECE] * -(-sum(sizes) // PIECE), "pages are locked once"
    assert copy.num_bytes == sum(pinned)


def test_other_blocks_replace_those_of_before() -> None:
    first, second = make_blocks(3 * PIECE), make_blocks(5, 5 * PIECE)
    copy = HostCopy(lambda piece: None, PIECE)
    copy.save(first)
    copy.save(second)
    before = [block.clone() for block in second]
    for block in (*first, *second):
        block.zero_()
    copy.restore()
    assert all(map(torch.equal, second, before))
    assert not first[0].any()
    assert copy.num_bytes == 6 * PIECE


def test_pages_are_locked_by_several_threads_at_a_time() -> None:
    meeting = threading.Barrier(4, timeout=20)
    HostCopy(lambda piece: meeting.wait(), PIECE).save(make_blocks(4 * PIECE))
    assert not meeting.broken, "one thread locks pages after another"


def test_memory_that_cannot_be_locked_is_used_unlocked(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(piece: torch.Tensor) -> None:
        raise RuntimeError("memory cannot be page-locked (CUDA error 2)")

    blocks = make_blocks(PIECE)
    before = blocks[0].clone()
    copy = HostCopy(refuse, PIECE)
    copy.save(blocks)
    blocks[0].zero_()
    copy.restore()
    assert torch.equal(blocks[0], before)
    assert "CUDA error 2" in caplog.text


def test_allocated_pages_are_zeros_that_can_be_written() -> None:
    memory = allocate_pages(1 << 16)
    assert not any(memory[:])
    memory[:4] = b"page"
    assert memory[:4] == b"page"
