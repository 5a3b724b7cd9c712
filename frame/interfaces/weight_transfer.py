"""The interface of weight transfers: how tensors come from a trainer into the ranks of an engine
(`weight_transfer/1`).

A rank has one object for each trainer's channel. It calls `open` of transfers with `joins` in a
thread, while steps run, and everything else when no step is in flight. A transfer must not know a
model, a layer or a request. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.weight_transfer import TransferPart


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
        """Yield each tensor of a part once, in its order, with its dtype, any of
        `TRANSFER_DTYPES` that the trainer can send, and shape, on any device.
        A tensor is valid, and its memory unchanged by the transfer, until the next one is
        requested. Raises TransferError, before the first tensor where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Leave the trainer. A second call does nothing. May be called by another thread while
        `open` waits for the trainer, which then should end early."""
