"""`HostCopy`: a copy of device memory in page-locked memory of the host.

Used by the `cuda` platform for what a sleep keeps. The system makes and locks new pages at a
fraction of the rate of a transfer, so a thread does it in advance; several do what is missing, a
piece at a time, while pieces that are ready are copied. The pieces stay for later copies. Must not
know what the memory holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

import torch

from frame.host.host_memory import allocate_pages, measure_host_memory

log = logging.getLogger(__name__)

PIECE = 128 << 20  # bytes
THREADS = 16
REST = 3  # times the time for a piece, before the next one is made in advance: locks of the process and the driver are held


class HostCopy:
    """pin: locks the pages of host memory. Raises RuntimeError where it cannot."""

    def __init__(self, pin: Callable[[torch.Tensor], object], piece: int = PIECE) -> None:
        self._pin = pin
        self._piece = piece
        self._pieces: list[torch.Tensor] = []  # uint8 [piece]
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory of the device, and its copy
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()

    @property
    def num_bytes(self) -> int:
        """Of the host, which stay allocated."""
        return len(self._pieces) * self._piece

    def prepare(self, num_bytes: int) -> None:
        """Make pieces for a later copy of so many bytes in a thread, as long as half of the host's
        memory is available."""

        def make() -> None:
            while self.num_bytes < num_bytes and not self._stops.is_set():
                total, available = measure_host_memory()
                if available < total // 2:
                    return
                began = time.perf_counter()
                self._pieces.append(self._make_piece())
                self._stops.wait(REST * (time.perf_counter() - began))

        self._thread = threading.Thread(target=make, name="pages-of-sleep", daemon=True)
        self._thread.start()

    def save(self, blocks: Sequence[torch.Tensor]) -> None:
        """Copy blocks, contiguous and uint8, instead of those of before. Some transfers may run
        when it returns; nothing may write to the blocks until the device is synchronized."""
        self._parts = []
        if self._thread is not None:
            self._stops.set()
            self._thread.join()
        with ThreadPoolExecutor(THREADS) as threads:
            size = sum(len(block) for block in blocks)
            missing = -(-size // self._piece) - len(self._pieces)
            new = [threads.submit(self._make_piece) for _ in range(missing)]
            kept = len(self._pieces)
            for number, cuts in groupby(_cut(blocks, self._piece), key=lambda cut: cut[0]):
                if number >= kept:
                    self._pieces.append(self._take(new, number - kept))
                for _, start, memory in cuts:
                    copy = self._pieces[number][start : start + len(memory)]
                    copy.copy_(memory, non_blocking=True)
                    self._parts.append((memory, copy))

    def restore(self) -> None:
        """Copy the values back, of which some transfers may run when it returns."""
        for memory, copy in self._parts:
            memory.copy_(copy, non_blocking=True)

    def _take(self, new: Sequence[Future[torch.Tensor]], index: int) -> torch.Tensor:
        """A new piece. If it could not be made, the later ones stay, because their pages are
        locked."""
        try:
            return new[index].result()
        except OSError:
            self._pieces += [each.result() for each in new[index + 1 :] if each.exception() is None]
            raise

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
