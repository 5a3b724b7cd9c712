"""`Collective`: a group of ranks that reduce, gather and exchange tensors.

Every collective derives from `Collective`; the classes named `Supports…` are optional, and users
find them by `isinstance` at construction. Layers and MoE dispatchers get the tensor-parallel group
as `context.tp`. Each rank constructs its member of the group, which joins the others at a
rendezvous address; ranks may run on several hosts. Importing this page imports no torch. Must not
know a model or another plugin kind except the platform.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from frame.core.interfaces.platform import HOST, Platform
from frame.core.interfaces.plugin import Reason, list_batch_obstacles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from pydantic import BaseModel

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class CollectiveRequirements:
    """What a platform and a number of ranks require of a collective."""

    device: str  # name of the platform
    size: int  # ranks
    num_hosts: int = 1
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too
    deterministic: bool = False  # execution.deterministic: only what is `batch_invariant` fits


@dataclass(frozen=True, slots=True)
class CollectiveCapabilities:
    """What a collective can do."""

    devices: tuple[str, ...]  # platforms whose tensors it takes
    capturable: bool = False  # its operations can be captured in the platform's graphs
    max_size: int | None = None  # ranks; None: any number
    several_hosts: bool = True  # ranks may run on different hosts
    batch_invariant: bool = False  # sums add in the order of the ranks at any size, under `CollectiveContext.deterministic`
    linked_ranks: int = 0  # `auto` chooses it for up to so many tensor-parallel ranks on linked devices (`Accelerator.is_linked`)

    def unsupported(self, requirements: CollectiveRequirements) -> list[Reason]:
        reasons = []
        if requirements.device not in self.devices:
            reasons.append(Reason(f"takes tensors of {' or '.join(self.devices)}, not of {requirements.device}"))
        if self.max_size is not None and requirements.size > self.max_size:
            reasons.append(Reason(f"connects at most {self.max_size} rank(s), not {requirements.size}", f"parallel.tp: {self.max_size}"))
        if requirements.num_hosts > 1 and not self.several_hosts:
            reasons.append(Reason(f"connects ranks of one host, not of {requirements.num_hosts}"))
        return [*reasons, *list_batch_obstacles(self, requirements)]


@dataclass(frozen=True, slots=True)
class CollectiveContext:
    """One rank's place in a group.

    address: where the ranks meet, the same for all of them and new for each start: "file:///path"
    (a file that no rank has made yet, for ranks of one host) or "tcp://host:port" (rank 0 listens
    there). host: the address of the network interface that this rank is reached at. timeout:
    seconds, for joining and for each operation. name: of the group, where several groups meet at
    one address. listens: the process of this rank listens at a "tcp://" address; None: the group's
    rank 0 does. deterministic: sums add in the order of the ranks, whatever their size.
    """

    rank: int = 0
    size: int = 1
    address: str = ""
    platform: Platform = field(default=HOST)
    host: str = LOOPBACK
    timeout: float = 300.0
    name: str = ""
    listens: bool | None = None
    deterministic: bool = False


class Transfer(Protocol):
    """A send in progress."""

    def wait(self) -> None:
        """Return when the tensor may be written again; on a device, order the current stream after
        the send. Raises RuntimeError if the other rank does not receive it."""
        ...


class Collective(ABC):
    """One rank's member of a group. All ranks call the same operations in the same order.

    Tensors are on the platform's device; all ranks give the same dtype, and the same shape except
    where an operation says otherwise. Results are on the device too, ordered on the current stream.
    If a rank does not answer within the timeout, the others raise RuntimeError. The constructor
    joins the group, and raises RuntimeError if the other ranks do not come in time.
    """

    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        self.context = context
        self.options = options
        self.rank = context.rank
        self.size = context.size

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, the same bits on all of them; may be in place; returns the sum."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenation over the ranks along `dim`."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The source rank's tensor on every rank; may be in place; returns it."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send to one rank, which calls `recv`. Returns when `tensor` may be written again."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill `tensor`, contiguous, with the next one that `source` sends here; returns it."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The sum over the ranks, of which each rank gets an equal part along `dim`, in the order
        of the ranks."""
        return self.all_reduce(tensor).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        """Exchange rows [n, ...]: the first `send_rows[0]` go to rank 0, the next `send_rows[1]` to
        rank 1, and so on. -> the received rows, `recv_rows[r]` from rank r, in the order of the
        ranks; [0, ...] where there are none."""
        sent, result = tensor.split(list(send_rows)), tensor.new_empty(sum(recv_rows), *tensor.shape[1:])
        received = list(result.split(list(recv_rows)))
        received[self.rank].copy_(sent[self.rank])
        for total in range(2 * self.size - 1):  # in one order on all ranks: no circle of ranks waits
            other = total - self.rank
            if 0 <= other < self.size and other != self.rank:
                _exchange(self, sent, received, other)
        return result

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this rank raise RuntimeError at once."""


def _exchange(group: Collective, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], other: int) -> None:
    """Send a part to `other` and receive one; the lower rank sends first."""
    for sends in (group.rank < other, group.rank > other):
        if sends and len(sent[other]):
            group.send(sent[other].contiguous(), other)
        elif not sends and len(received[other]):
            group.recv(received[other], other)


class SupportsReduceNorm(ABC):
    """Optional: one kernel for a sum over the ranks and the norm after it."""

    @abstractmethod
    def reduce_add_norm(self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """norm(s + residual), where s is the sum over the ranks of `tensor` [rows, size], and
        norm(x) is x / rms(x) * weight; writes s + residual over `residual`. None, on all ranks,
        where there is no such kernel for these tensors."""


class SupportsReduceMatmul(ABC):
    """Optional: sends one part of a matmul's result while another is computed."""

    @abstractmethod
    def reduce_matmul(self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, columns: int) -> torch.Tensor | None:
        """The sum over the ranks of `multiply(x)` [rows, columns], which has x's dtype. `multiply`
        takes any number of rows. None, on all ranks, where the collective does not do so for this
        size."""


class SupportsStartSend(ABC):
    """Optional: sends without waiting for the other rank's `recv`. Without it, pipeline stages wait
    for each other in `send`."""

    @abstractmethod
    def start_send(self, tensor: torch.Tensor, target: int) -> Transfer | None:
        """Send to one rank. `tensor` must not be written before the transfer's `wait`; None: it may
        be written now."""


class LocalGroup(Collective):
    """One rank alone: every operation returns its argument."""

    def __init__(self, context: CollectiveContext | None = None, options: BaseModel | None = None) -> None:
        super().__init__(context or CollectiveContext(), options)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, target: int) -> None:
        raise ValueError("a group of one has no rank to send to")

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        raise ValueError("a group of one has no rank to receive from")
