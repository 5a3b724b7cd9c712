"""Buffers of one block each in host memory, for the tiers of this folder. Allocated in pieces by a
thread, so that a start does not wait for gigabytes. Must not know a key."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from math import gcd
from mmap import PAGESIZE
from queue import SimpleQueue
from typing import TYPE_CHECKING

import xxhash

from frame.core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.kv_tier import KVTierContext

GIB = 1 << 30
PIECE_BYTES = 64 << 20  # of one allocation

_log = logging.getLogger(__name__)


def count_blocks(option: str, gib: float, block_bytes: int) -> int:
    """The blocks that an option's GiB hold. Raises ConfigurationError if that is none."""
    count = int(gib * GIB) // block_bytes
    if not count:
        minimum = -(-block_bytes * 1000 // GIB) / 1000
        raise ConfigurationError(f"{option} of {gib:g} GiB holds no block of {block_bytes:,} bytes; set it to at least {minimum:g}.")
    return count


class BufferPool:
    """Up to `num_buffers` buffers, uint8 [block_bytes]. One thread takes and returns them.
    `on_piece`: called in the thread that allocates, for each piece of memory."""

    def __init__(self, context: KVTierContext, num_buffers: int, on_piece: Callable[[torch.Tensor], None] | None = None) -> None:
        self._context, self._num_buffers, self._on_piece = context, num_buffers, on_piece
        self._free: list[torch.Tensor] = []
        self._pieces: SimpleQueue[Sequence[torch.Tensor]] = SimpleQueue()  # buffers
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._allocate, name="kv-tier-memory", daemon=True)
        self._thread.start()

    @property
    def num_free(self) -> int:
        """Free buffers, those that have been allocated so far."""
        while not self._pieces.empty():
            self._free += self._pieces.get()
        return len(self._free)

    def take_buffers(self, count: int) -> list[torch.Tensor] | None:
        """None: fewer are free. Their contents are arbitrary."""
        if count > self.num_free:
            return None
        start = len(self._free) - count
        taken, self._free[start:] = self._free[start:], []
        return taken

    def return_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Nothing may use them any more."""
        self._free += buffers

    def record_block(self, key: bytes, buffer: torch.Tensor, digest: bytes) -> None:
        """A buffer holds a block, until it is returned. Where memory outlives the process, the
        block counts for the next one from now on."""

    def end_records(self) -> None:
        """No block counts for the next process any more, also none that is recorded later."""

    def close(self, timeout: float) -> None:
        """Stop the allocation, waiting up to `timeout` seconds for the piece in progress."""
        self._is_closed.set()
        self._thread.join(timeout)
        self._free.clear()
        while not self._pieces.empty():
            self._pieces.get()

    def _allocate(self) -> None:
        whole = PAGESIZE // gcd(PAGESIZE, self._context.block_bytes)  # buffers: a page of memory is locked once
        per_piece = max(1, PIECE_BYTES // self._context.block_bytes // whole) * whole
        for start in range(0, self._num_buffers, per_piece):
            if self._is_closed.is_set():
                return
            count = min(per_piece, self._num_buffers - start)
            try:
                piece = self._allocate_piece(start, count)
            except (MemoryError, RuntimeError) as error:
                _log.warning("A KV cache tier has memory for %d of %d blocks: %s", start, self._num_buffers, error)
                return
            if self._on_piece is not None:
                self._on_piece(piece)
            self._pieces.put(self._list_free(start, piece.view(-1, self._context.block_bytes).unbind()))

    def _allocate_piece(self, start: int, count: int) -> torch.Tensor:
        """Memory of `count` buffers from number `start` on."""
        return self._context.allocate(count * self._context.block_bytes)

    def _list_free(self, start: int, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of new buffers that hold nothing."""
        return buffers


def compute_digest(block: memoryview) -> bytes:
    """16 bytes. `update` releases the GIL in every version of xxhash, other than the functions."""
    digest = xxhash.xxh3_128()
    digest.update(block)
    return digest.digest()
