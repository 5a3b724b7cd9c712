"""`KeptPool`: buffers in memory that outlives the engine, with a record of each block that counts.

A record is written after its block and erased before the block's buffer is used again, so an engine
that is killed leaves whole blocks. Used by the tier `host`. Must not know a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from mmap import PAGESIZE
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.plugins.kv_tiers.buffers import BufferPool

if TYPE_CHECKING:
    from frame.core.interfaces.kv_tier import KVTierContext

_FORMAT = 1  # of the memory
_KEY_BYTES, _DIGEST_BYTES, _NAME_BYTES = 32, 16, 32


class KeptPool(BufferPool):
    """The memory is: a name of its layout and of what blocks hold; of each buffer the number of its
    block in the order of their stores (0: it holds none), the block's key and its digest; and the
    buffers."""

    def __init__(self, context: KVTierContext, map_kept: Callable[[int], np.ndarray], num_buffers: int) -> None:
        size = context.block_bytes
        capacity = 1 << (num_buffers - 1).bit_length()  # so that few more or fewer buffers have the same places
        ends = np.cumsum([_NAME_BYTES, 8 * capacity, _KEY_BYTES * capacity, _DIGEST_BYTES * capacity])
        start = -(-int(ends[-1]) // PAGESIZE) * PAGESIZE
        memory = map_kept(start + num_buffers * size)
        name, orders, keys, digests = np.split(memory[: ends[-1]], ends[:-1])
        self._orders, self._keys, self._digests = orders.view(np.uint64), keys.reshape(-1, _KEY_BYTES), digests.reshape(-1, _DIGEST_BYTES)
        self._blocks = torch.from_numpy(memory[start:]).view(num_buffers, size)
        layout = blake2b(f"{_FORMAT} {size} {capacity} {context.identity}".encode(), digest_size=_NAME_BYTES).digest()
        if name.tobytes() != layout:
            self._orders[:] = 0
            name[:] = np.frombuffer(layout, np.uint8)
        self._orders[num_buffers:] = 0
        self._held = self._orders > 0  # when this pool began
        self._last = int(self._orders.max(initial=0))
        self._is_recording = True
        super().__init__(context, num_buffers)

    def list_blocks(self) -> Iterator[tuple[bytes, torch.Tensor, bytes]]:
        """(key, buffer, digest) of the blocks that earlier engines left, the oldest first."""
        numbers = np.flatnonzero(self._held)
        for number in numbers[np.argsort(self._orders[numbers])]:
            yield self._keys[number].tobytes(), self._blocks[number], self._digests[number].tobytes()

    def record_block(self, key: bytes, buffer: torch.Tensor, digest: bytes) -> None:
        if self._is_recording:
            number, self._last = self._find_number(buffer), self._last + 1
            self._keys[number], self._digests[number] = np.frombuffer(key, np.uint8), np.frombuffer(digest, np.uint8)
            self._orders[number] = self._last

    def end_records(self) -> None:
        self._is_recording = False
        self._orders[:] = 0

    def return_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        returned = list(buffers)
        for buffer in returned:
            self._orders[self._find_number(buffer)] = 0
        super().return_buffers(returned)

    def _find_number(self, buffer: torch.Tensor) -> int:
        return (buffer.data_ptr() - self._blocks.data_ptr()) // self._context.block_bytes

    def _allocate_piece(self, start: int, count: int) -> torch.Tensor:
        piece = self._blocks[start : start + count]
        self._context.pin(piece)
        return piece

    def _list_free(self, start: int, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [buffer for number, buffer in enumerate(buffers, start) if not self._held[number]]
