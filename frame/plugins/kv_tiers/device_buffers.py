"""Buffers of one block each in the memory of a device, and checksums of them that the device
computes. Used by the tier `nixl`. Must not know a key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from frame import kernels
from frame.core.interfaces.platform import Platform, SupportsStreams
from frame.plugins.kv_tiers.buffers import BufferPool

_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd factors


class DevicePool(BufferPool):
    """Buffers in one piece of device memory. Those that are taken together are in the reverse order
    of their addresses, and used from the last one on, so that neighbours are moved at once."""

    def __init__(  # the memory needs no thread
        self, device: torch.device, num_buffers: int, block_bytes: int, on_piece: Callable[[torch.Tensor], None]
    ) -> None:
        self._memory = torch.empty(num_buffers * block_bytes, dtype=torch.uint8, device=device)
        on_piece(self._memory)
        self._buffers = self._memory.view(num_buffers, block_bytes).unbind()
        self._numbers = {buffer.data_ptr(): number for number, buffer in enumerate(self._buffers)}
        self._free_numbers = list(range(num_buffers))

    @property
    def num_free(self) -> int:
        return len(self._free_numbers)

    def take_buffers(self, count: int) -> list[torch.Tensor] | None:
        if count > self.num_free:
            return None
        start = self.num_free - count
        taken, self._free_numbers[start:] = self._free_numbers[start:], []
        return [self._buffers[number] for number in sorted(taken, reverse=True)]

    def return_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        self._free_numbers += [self._numbers[buffer.data_ptr()] for buffer in buffers]

    def close(self, timeout: float) -> None:
        """The memory is freed with its last user."""
        self._free_numbers.clear()


class DeviceChecksums:
    """Computes checksums on a stream of its own for each thread. Threads call it at the same
    time."""

    def __init__(self, platform: Platform) -> None:
        assert isinstance(platform, SupportsStreams), "a device with memory of its own has streams"
        self._activate, self._streams, self._local = platform.activate, platform, threading.local()

    def compute(self, blocks: Sequence[torch.Tensor]) -> list[bytes]:
        """The checksum of each block, uint8 [bytes], whose contents nothing writes now."""
        if not blocks:
            return []
        if not hasattr(self._local, "stream"):
            self._activate()
            self._local.stream = self._streams.create_stream()
        with self._streams.use_stream(self._local.stream):
            return [number.tobytes() for number in sum_words(blocks).cpu().numpy()]


@torch.inference_mode()
def sum_words(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `frame.kernels.block_checksums.sum_blocks`, which it calls where it can."""
    device, num_words = blocks[0].device, blocks[0].numel() // 8
    if kernels.can_use_triton(device):
        from frame.kernels.block_checksums import sum_blocks

        addresses = torch.from_numpy(np.array([block.data_ptr() for block in blocks], np.int64))
        return sum_blocks(addresses.to(device), num_words, _FIRST, _SECOND)
    places = torch.arange(1, num_words + 1, device=device) * _FIRST
    sums = []
    for block in blocks:
        value = block.view(torch.int64) ^ places
        value = (value ^ (value >> 31)) * _SECOND
        sums.append((value ^ (value >> 29)).sum())
    return torch.stack(sums)
