"""The interface of weight transfers: how tensors come from a trainer into the ranks of an engine
(`weight_transfer/1`).

A rank has one object for each trainer's channel, and calls it when no step is in flight. It must
not know a model, a layer or a request. Imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

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


@dataclass(frozen=True, slots=True)
class WeightTransferCapabilities(Anything):
    """What a transfer does."""

    joins: bool = False  # `open` meets the trainer, and a part is a collective: every rank and the trainer take part
    shares: bool = False  # parts name buffers of this host's memory


@dataclass(frozen=True, slots=True)
class WeightTransferContext:
    """The rank that receives."""

    device: torch.device  # of the model
    rank: int = 0  # of this engine, from 0
    num_ranks: int = 1
    timeout: float = 60.0  # seconds that `open` and the tensors of a part may take


class WeightTransfer(ABC):
    """The tensors of one trainer.

    Contract: nothing that a trainer sends is unpickled or executed. A failure raises TransferError,
    one sentence, within `context.timeout` and a few seconds, and leaves nothing open; a later part
    may succeed. After `close`, the object holds no memory, handle, file or socket.
    """

    def __init__(self, context: WeightTransferContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def open(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer. `info`: what the trainer said about the connection. Raises
        TransferError for a field that is missing, wrong or unknown."""

    @abstractmethod
    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of a part once, in its order, with its dtype and shape, on any device.
        A tensor is valid, and its memory unchanged by the transfer, until the next one is
        requested. Raises TransferError, before the first tensor where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Leave the trainer. A second call does nothing."""
