"""`HostCopy`: a copy of device memory in page-locked memory of the host.

Used by the `cuda` platform for what a sleep keeps. The system makes and locks new pages at a
fraction of the rate of a transfer, so threads do it in advance, a piece at a time, and the pieces
stay for later copies. Must not know what the memory holds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from frame.host.host_memory import allocate_pages

log = logging.getLogger(__name__)

PIECE = 128 << 20  # bytes
THREADS = 8


class HostCopy:
    """pin: locks the pages of host memory, in any thread. Raises RuntimeError where it cannot."""

    def __init__(self, pin: Callable[[torch.Tensor], object], piece: int = PIECE) -> None:
        self._pin = pin
        self._piece = piece
        self._pieces: list[torch.Tensor] = []  # uint8 [piece]
        self._num_begun = self._num_wanted = 0  # of pieces
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory of the device, and its copy

    @property
    def num_bytes(self) -> int:
        """Of the host, which stay allocated."""
        return len(self._pieces) * self._piece

    def prepare(self, num_bytes: int) -> None:
        """Make the memory of a copy of so many bytes, in the background."""
        with self._changed:
            missing = -(-num_bytes // self._piece) - self._num_wanted
            self._num_wanted += max(0, missing)
        for _ in range(min(THREADS, missing)):
            threading.Thread(target=self._make_pieces, name="host-copy", daemon=True).start()

    def save(self, blocks: Sequence[torch.Tensor]) -> None:
        """Copy blocks, contiguous and uint8, instead of those of before. Some transfers may run
        when it returns; nothing may write to the blocks until the device is synchronized."""
        self._parts = []
        self.prepare(sum(len(block) for block in blocks))
        for number, start, memory in _cut(blocks, self._piece):
            copy = self._wait_for_piece(number)[start : start + len(memory)]
            copy.copy_(memory, non_blocking=True)
            self._parts.append((memory, copy))

    def restore(self) -> None:
        """Copy the values back, of which some transfers may run when it returns."""
        for memory, copy in self._parts:
            memory.copy_(copy, non_blocking=True)

    def _wait_for_piece(self, number: int) -> torch.Tensor:
        with self._changed:
            self._changed.wait_for(lambda: len(self._pieces) > number or self._error is not None)
            if len(self._pieces) <= number:
                raise RuntimeError("the host has no memory for a copy of the weights") from self._error
            return self._pieces[number]

    def _make_pieces(self) -> None:
        while True:
            with self._changed:
                if self._num_begun == self._num_wanted:
                    return
                self._num_begun += 1
            try:
                piece = self._make_piece()
            except Exception as error:  # noqa: BLE001 - `save` raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._pieces.append(piece)
                self._changed.notify_all()

    def _make_piece(self) -> torch.Tensor:
        piece = torch.frombuffer(allocate_pages(self._piece), dtype=torch.uint8)
        try:
            self._pin(piece)
        except RuntimeError as error:
            log.warning("a sleep copies slower than it could: %s", error)
        return piece


def _cut(blocks: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(number of a piece, start in it, memory), in order, of blocks laid into pieces one after
    another."""
    place = 0
    for block in blocks:
        at = 0
        while at < len(block):
            number, start = divmod(place, size)
            memory = block[at : at + size - start]
            yield number, start, memory
            at, place = at + len(memory), place + len(memory)
