"""What a trainer says about the tensors that it sends into a running engine: a part, which orders
to the ranks carry. The transfers themselves are plugins (`frame.interfaces.weight_transfer`).

Must not know a model, a layer or a request. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

# Names of torch that a trainer may send -> bytes of a value.
TRANSFER_DTYPES: Mapping[str, int] = MappingProxyType({
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
})  # fmt: skip


class TransferError(RuntimeError):
    """The trainer's tensors did not come, or are not those of its message: one sentence."""


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor of a part, as its message describes it."""

    name: str  # in the checkpoint
    dtype: str  # a key of TRANSFER_DTYPES
    shape: tuple[int, ...]  # whole, not of a rank
    buffer: int = 0  # number of the buffer that holds it, for channels with buffers
    offset: int = 0  # of its first byte there

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * TRANSFER_DTYPES[self.dtype]


class SharedBuffer(msgspec.Struct, frozen=True):
    """Memory of the trainer that this host can open. Buffers of one number on several devices hold
    the same bytes."""

    number: int
    device: str  # "cpu", or the UUID of a GPU
    handle: str  # on the CPU the name of a file in /dev/shm; on a GPU the allocation's IPC handle, hexadecimal
    size: int  # bytes
    offset: int = 0  # on a GPU: of the first byte in the allocation
    counter: str = ""  # on a GPU: torch's handle of the reference counter, hexadecimal, and the counter's place
    counter_offset: int = 0
    event: str = ""  # on a GPU: the IPC handle of the event after the last write, hexadecimal
    has_event: bool = False


class TransferPart(msgspec.Struct, frozen=True):
    """Tensors that come together: a bucket."""

    tensors: tuple[TensorSpec, ...]
    buffers: tuple[SharedBuffer, ...] = ()
    layout: Literal["separate", "flattened"] = "separate"  # flattened: all bytes follow one another in one uint8 tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)
