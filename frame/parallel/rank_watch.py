"""`RankWatch`: says which collective a rank waits in for long, and in which step.

A thread of each rank reports it. On a device, collectives are queued, and a rank waits at the end
of its step. Used by the processes of several ranks. Must not know a collective by name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from frame.core.interfaces.collective import Collective, SupportsReduceMatmul, SupportsReduceNorm, SupportsStartSend

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.collective import Transfer

log = logging.getLogger(__name__)

LONG_WAIT = 3.0  # seconds; then a wait is reported, and once more when it ends


class RankWatch:
    """What this rank does. `rank`, `size`: its number among the ranks of the engine."""

    def __init__(self, rank: int, size: int, long_wait: float = LONG_WAIT) -> None:
        self.rank, self.size, self.step = rank, size, -1
        self._long_wait = long_wait
        self._waits: tuple[str, float] | None = None  # what for, and since when (time.monotonic)
        self._reported: tuple[str, float] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="rank-watch", daemon=True).start()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The body may wait for other ranks, in `what`."""
        outer, self._waits = self._waits, (what, time.monotonic())
        try:
            yield
        finally:
            self._waits = outer

    def describe_wait(self, now: float) -> str | None:
        """A sentence about a wait that has taken long at the time `now`; None if there is none."""
        waits = self._waits
        if waits is None or now - waits[1] < self._long_wait:
            return None
        what, since = waits
        step = f"step {self.step}" if self.step >= 0 else "a warm-up step"
        return f"rank {self.rank} of {self.size} has waited {now - since:.0f} s in {what} of {step}"

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._long_wait / 3):
            current = self._waits
            if self._reported is not None and current != self._reported:
                log.warning("rank %d of %d goes on after %s", self.rank, self.size, self._reported[0])
                self._reported = None
            sentence = self.describe_wait(time.monotonic())
            if sentence is not None and self._reported is None:
                self._reported = current
                log.error("%s: another rank is slow, hangs, or has ended", sentence)


class WatchedGroup(Collective, SupportsReduceNorm, SupportsReduceMatmul, SupportsStartSend):
    """A group whose waits are watched. `name`: of the group, in sentences. Offers what the group
    offers."""

    def __init__(self, group: Collective, watch: RankWatch, name: str) -> None:
        super().__init__(group.context, group.options)
        self._group, self._watch, self._name = group, watch, name
        self._reduce_add_norm = group.reduce_add_norm if isinstance(group, SupportsReduceNorm) else None
        self._reduce_matmul = group.reduce_matmul if isinstance(group, SupportsReduceMatmul) else None
        self._start_send = group.start_send if isinstance(group, SupportsStartSend) else None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._watch.waiting(f"all-reduce ({self._name})"):
            return self._group.all_reduce(tensor)

    def reduce_add_norm(self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        if self._reduce_add_norm is None:
            return None
        with self._watch.waiting(f"all-reduce ({self._name})"):
            return self._reduce_add_norm(tensor, residual, weight, eps)

    def reduce_matmul(self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, columns: int) -> torch.Tensor | None:
        if self._reduce_matmul is None:
            return None
        with self._watch.waiting(f"all-reduce ({self._name})"):
            return self._reduce_matmul(multiply, x, columns)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        with self._watch.waiting(f"all-gather ({self._name})"):
            return self._group.all_gather(tensor, dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        with self._watch.waiting(f"broadcast ({self._name})"):
            return self._group.broadcast(tensor, source)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        with self._watch.waiting(f"reduce-scatter ({self._name})"):
            return self._group.reduce_scatter(tensor, dim)

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        with self._watch.waiting(f"all-to-all ({self._name})"):
            return self._group.all_to_all(tensor, send_rows, recv_rows)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        with self._watch.waiting(f"send ({self._name})"):
            self._group.send(tensor, target)

    def start_send(self, tensor: torch.Tensor, target: int) -> Transfer | None:
        if self._start_send is not None:
            return self._start_send(tensor, target)
        self.send(tensor, target)
        return None

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        with self._watch.waiting(f"recv from {source} ({self._name})"):
            return self._group.recv(tensor, source)

    def close(self) -> None:
        self._watch.close()
        self._group.close()
