"""Several ranks in one process: threads that meet at a barrier, so that tensor parallelism is
tested without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from frame.core.interfaces.collective import SupportsReduceMatmul, SupportsReduceNorm

T = TypeVar("T")


class Meeting:
    """The shared state of one group's ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors, on every rank."""
        self.given[rank] = tensor.clone()
        self.barrier.wait()
        everybody = list(self.given)
        self.barrier.wait()
        return everybody


class ThreadGroup(SupportsReduceNorm, SupportsReduceMatmul):
    """One rank's `Collective`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0)

    def reduce_add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """For norms that have a `scale` on the CPU, which are those with an offset."""
        residual += self.all_reduce(x)
        return F.rms_norm(residual.float(), weight.shape, weight.float(), eps).to(x.dtype)

    def reduce_matmul(self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, columns: int) -> torch.Tensor | None:
        """Of prompts alone, so that other steps join the sums with norms."""
        if len(x) < 12:
            return None
        total = self.all_reduce(torch.cat([multiply(rows) for rows in x.chunk(2)]))
        assert total.shape == (len(x), columns)
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self.meeting.exchange(self.rank, tensor)[source]


def on_ranks(size: int, act: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `act` on every rank, each in its own thread; returns the results by rank. Re-raises a
    rank's error."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(ThreadGroup(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return results
