"""A tensor-parallel group whose ranks are threads of one process
(`frame.core.interfaces.collective.Collective`). For suites that need several ranks.

Every call but `send` waits for the same call of all ranks, and raises AssertionError where a rank
makes another one, or none within some seconds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from frame.core.interfaces.collective import Collective, CollectiveContext

PATIENCE = 3.0  # seconds
T = TypeVar("T")


class _Exchange:
    def __init__(self, size: int, patience: float) -> None:
        self.barrier = threading.Barrier(size, timeout=patience)
        self.calls: list[tuple[str, torch.Tensor]] = [("", torch.empty(0))] * size
        pairs = ((source, target) for source in range(size) for target in range(size))
        self.messages: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {pair: queue.SimpleQueue() for pair in pairs}


class ThreadGroup(Collective):
    """One rank of the group."""

    def __init__(self, rank: int, size: int, exchange: _Exchange) -> None:
        super().__init__(CollectiveContext(rank, size))
        self._exchange = exchange

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet("all_reduce", tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._meet("all_gather", tensor), dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._meet(f"broadcast from {source}", tensor)[source].clone()

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._exchange.messages[self.rank, target].put(tensor.clone())

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        try:
            return tensor.copy_(self._exchange.messages[source, self.rank].get(timeout=PATIENCE))
        except queue.Empty:
            raise AssertionError(f"rank {self.rank} waits for a tensor that rank {source} does not send") from None

    def _meet(self, call: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks."""
        exchange = self._exchange
        exchange.calls[self.rank] = (f"{call} of {tensor.dtype} {list(tensor.shape)}", tensor.clone())
        try:
            exchange.barrier.wait()
            calls = list(exchange.calls)
            exchange.barrier.wait()
        except threading.BrokenBarrierError:
            raise AssertionError(f"rank {self.rank} waits in {exchange.calls[self.rank][0]}, and another rank makes no such call") from None
        assert len({name for name, _ in calls}) == 1, f"the ranks make different calls: {', '.join(name for name, _ in calls)}"
        return [tensor for _, tensor in calls]

    def abort(self) -> None:
        """Let ranks that wait fail at once."""
        self._exchange.barrier.abort()


def run_ranks(size: int, work: Callable[[ThreadGroup], T], patience: float = PATIENCE) -> Sequence[T]:
    """The results of `work` on all ranks; raises the error of the first rank that failed.
    `patience`: seconds for which a rank waits for the others."""
    exchange = _Exchange(size, patience)
    groups = [ThreadGroup(rank, size, exchange) for rank in range(size)]

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group) for group in groups]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: "waits in" in str(error)):  # the cause before those that it stopped
        raise error
    return [future.result() for future in futures]
