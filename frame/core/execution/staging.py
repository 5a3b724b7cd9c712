"""`Staging`: moves the host arrays of a step to the device in one copy.

Used by the input batch. Must not know what the arrays are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch

from frame.core.interfaces.platform import Platform, SupportsStreams

_ALIGNMENT = 16
_NUM_BUFFERS = 2


class Staging(Protocol):
    """Moves a step's host arrays to the device. `move` is called once per step, on the step's
    stream; its tensors are valid until the copy of the next `move` runs."""

    def move(self, arrays: Any) -> Any:
        """C-contiguous arrays of any torch dtype, in a tree of dataclasses, tuples and mappings ->
        the same tree with device tensors in their place."""
        ...


def make_staging(platform: Platform, num_bytes: int) -> Staging:
    """The staging of a device. num_bytes: expected of one step; larger steps grow the buffers."""
    return PinnedCopies(platform, platform.device, num_bytes) if isinstance(platform, SupportsStreams) else SharedMemory()


def map_arrays(tree: Any, convert: Callable[[np.ndarray], Any]) -> Any:
    """A dataclass or tuple of arrays, mappings of arrays, and further dataclasses and tuples, with
    `convert` of each array in its place. None and what is empty stays."""
    kind: Any = type(tree)
    if kind is dict:
        return {name: convert(each) for name, each in tree.items()}
    values = tree if kind is tuple else _get_fields(kind)(tree)
    mapped = [convert(each) if type(each) is np.ndarray else each and map_arrays(each, convert) for each in values]
    return tuple(mapped) if kind is tuple else kind(*mapped)


@lru_cache(maxsize=64)
def _get_fields(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the fields of a dataclass, of which there are at least two."""
    return attrgetter(*(field.name for field in fields(kind)))


class SharedMemory:
    """The CPU's staging: views, no copies. The caller must not write to the arrays afterwards."""

    def move(self, arrays: Any) -> Any:
        return map_arrays(arrays, torch.from_numpy)


class PinnedCopies:
    """CUDA's staging: packs the arrays into pinned memory and makes one asynchronous copy to a
    device buffer of fixed address.

    Two pinned buffers take turns, so that a copy in flight is never overwritten.
    """

    def __init__(self, platform: SupportsStreams, device: torch.device, num_bytes: int) -> None:
        self._platform = platform
        self._device = device
        self._turn = 0
        self._copied = [platform.create_event() for _ in range(_NUM_BUFFERS)]
        self._allocate(num_bytes)

    def move(self, arrays: Any) -> Any:
        packed: list[np.ndarray] = []
        map_arrays(arrays, packed.append)
        offsets, total = [], 0
        for array in packed:
            offsets.append(total)
            total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if total > self._target.numel():
            self._platform.get_current_stream().synchronize()
            self._allocate(2 * total)
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        self._copied[self._turn].synchronize()
        host = self._host[self._turn]
        for offset, array in zip(offsets, packed, strict=True):
            host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._target[:total].copy_(self._pinned[self._turn][:total], non_blocking=True)
        self._copied[self._turn].record()
        places = iter(offsets)
        return map_arrays(arrays, lambda array: self._view(next(places), array))

    def _view(self, offset: int, like: np.ndarray) -> torch.Tensor:
        typed = self._typed.get(like.dtype)
        if typed is None:
            typed = self._typed[like.dtype] = self._target.view(to_torch_dtype(like.dtype))
        start = offset // like.itemsize
        values = typed[start : start + like.size]
        return values if like.ndim == 1 else values.view(like.shape)

    def _allocate(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._pinned = [self._platform.allocate_pinned((num_bytes,), torch.uint8) for _ in range(_NUM_BUFFERS)]
        self._host = [pinned.numpy() for pinned in self._pinned]
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._typed: dict[np.dtype, torch.Tensor] = {}  # the target viewed as each dtype


@lru_cache(maxsize=32)
def to_torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
