"""Collectives of a tensor-parallel group: a group of one rank, and torch process groups over gloo
(CPU) or NCCL (CUDA).

Only tensors are exchanged, so nothing is pickled. torch's default process group is not used, so one
process can run several engines.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from frame.core.interfaces.build import Collective


class LocalGroup:
    """A group of one rank: every operation returns its argument."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        return None


class TorchGroup:
    """The ranks of one host over one torch process group. Every rank must make the same calls in
    the same order.

    If a rank does not answer within the timeout, the other ranks raise RuntimeError.
    """

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self._groups = [group]  # cleared by `close` or at interpreter exit: a group that is destroyed later aborts the process
        self._finalizer = weakref.finalize(self, self._groups.clear)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._groups[0].allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._groups[0].allgather([gathered], [tensor]).wait()
        return torch.cat(gathered, dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._groups[0].broadcast(tensor, source).wait()
        return tensor

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this rank raise RuntimeError."""
        self._finalizer()


def connect(rank: int, size: int, folder: Path, device: torch.device, timeout: float = 300.0) -> LocalGroup | TorchGroup:
    """Join a process group.

    folder: rendezvous folder of this start, on one host, private to the process's user. timeout:
    seconds, for joining and for each call. Gloo listens on the loopback device only; NCCL
    uses the thread's current device. Raises
    RuntimeError if the other ranks do not join in time.
    """
    if size == 1:
        return LocalGroup()
    limit = timedelta(seconds=timeout)
    store = dist.FileStore(str(folder / "ranks"), size)
    store.set_timeout(limit)
    # torch takes a group's timeout and address only from underscored attributes of its options
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit  # noqa: SLF001
        return TorchGroup(rank, size, dist.ProcessGroupNCCL(store, rank, size, nccl))
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    options._timeout = limit  # noqa: SLF001
    return TorchGroup(rank, size, gloo(store, rank, size, options))


def is_true_on_all_ranks(value: bool, tp: Collective, device: torch.device) -> bool:
    """Whether `value` is true on all ranks."""
    if tp.size == 1:
        return value
    return bool(tp.all_gather(torch.tensor([int(value)], device=device), dim=0).min())
