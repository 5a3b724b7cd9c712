"""Moves one step's host arrays to the device in a single copy.

On the CPU arrays and tensors are one memory and nothing moves. On CUDA everything is packed into pinned memory, of which there are
two buffers in turn, so that a copy in flight is never overwritten; the device side is one buffer of fixed address.
Knows no batch: arrays in, tensors out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

_ALIGNMENT = 16
_NUM_BUFFERS = 2


class Staging(Protocol):
    """`put` is called once a step, on the stream that the step runs on; the tensors are good until the next `put`'s copy runs."""

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays (C-contiguous, any dtype torch knows) as tensors on the device, under the same names."""
        ...


def make_staging(device: torch.device, num_bytes: int) -> Staging:
    """The staging of a device; `num_bytes` is the most that one step is expected to bring (it grows when that was too little)."""
    return SharedMemory() if device.type == "cpu" else PinnedCopies(device, num_bytes)


class SharedMemory:
    """The CPU's staging: views, no copies. The arrays must not be written to afterwards by others."""

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        from_numpy = torch.from_numpy
        return {name: from_numpy(array) for name, array in arrays.items()}


class PinnedCopies:
    """CUDA's staging: pack, one asynchronous copy, views of the device buffer."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._turn = 0
        self._copied = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)]
        self._allocate(num_bytes)

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        offsets, total = [], 0
        for array in arrays.values():
            offsets.append(total)
            total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if total > self._target.numel():
            torch.cuda.current_stream(self._device).synchronize()
            self._allocate(2 * total)
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        self._copied[self._turn].synchronize()
        host = self._host[self._turn]
        for offset, array in zip(offsets, arrays.values(), strict=True):
            host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._target[:total].copy_(self._pinned[self._turn][:total], non_blocking=True)
        self._copied[self._turn].record()
        return {name: self._part(offset, array) for offset, (name, array) in zip(offsets, arrays.items(), strict=True)}

    def _part(self, offset: int, like: np.ndarray) -> torch.Tensor:
        typed = self._typed.get(like.dtype)
        if typed is None:
            typed = self._typed[like.dtype] = self._target.view(_torch_dtype(like.dtype))
        start = offset // like.itemsize
        part = typed[start : start + like.size]
        return part if like.ndim == 1 else part.view(like.shape)

    def _allocate(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._pinned = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_BUFFERS)]
        self._host = [pinned.numpy() for pinned in self._pinned]
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._typed: dict[np.dtype, torch.Tensor] = {}  # the target as numbers of one type


@lru_cache(maxsize=32)
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
