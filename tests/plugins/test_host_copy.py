"""The host's copy of memory that a sleep keeps, with pieces of a few bytes and a device that is the
host."""

from __future__ import annotations

import threading

import pytest
import torch

from frame.host.host_memory import allocate_pages
from frame.plugins.platforms import host_copy
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


def test_pages_are_made_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, available = threading.Event(), 100
    monkeypatch.setattr(host_copy, "measure_host_memory", lambda: (100, available))
    pinned: list[str] = []

    def pin(piece: torch.Tensor) -> None:
        pinned.append(threading.current_thread().name)
        if len(pinned) == 2:
            ready.set()

    copy = HostCopy(pin, PIECE)
    copy.prepare(PIECE + 1)
    assert ready.wait(20)
    blocks = make_blocks(2 * PIECE + 1)
    before = blocks[0].clone()
    copy.save(blocks)
    blocks[0].zero_()
    copy.restore()
    assert torch.equal(blocks[0], before)
    assert pinned[:2] == ["pages-of-sleep"] * 2 and len(pinned) == 3, "only the missing piece is made by the copy"
    available = 49
    full = HostCopy(pin, PIECE)
    full.prepare(PIECE)
    full.save([])
    assert full.num_bytes == 0, "pages are made though less than half of the memory is available"


def test_a_copy_ends_what_is_made_in_advance() -> None:
    meeting, made = threading.Barrier(2, timeout=20), []

    def pin(piece: torch.Tensor) -> None:
        made.append(piece)
        if len(made) == 1:
            meeting.wait()

    copy = HostCopy(pin, PIECE)
    copy.prepare(1 << 40)
    meeting.wait()
    blocks = make_blocks(3 * PIECE)
    copy.save(blocks)
    count = len(made)
    assert copy.num_bytes == count * PIECE < 1 << 30
    copy.save(blocks)
    assert len(made) == count


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
