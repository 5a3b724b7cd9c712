"""`LayerThreads`: a computation that stops after each layer, and goes on when it is asked to.

transformers' encoders compute all layers in one call. Here the call runs in another thread,
which waits before each layer but the first while its caller does something else: one of the two
runs at a time. So the layers compute what they would in one go, with the same bits. Used by
`TransformersEncoders`. Must not know an architecture or a modality.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import nn

Compute = Callable[[], Any]


class _Abandoned(BaseException):
    """The rest of the computation is not wanted; no handler of `Exception` stops it."""


class _Runner(threading.Thread):
    """A thread that computes one after another. It stays, because libraries keep plans for each
    thread: cuDNN would plan attention anew for each item."""

    def __init__(self) -> None:
        super().__init__(name="encoder layers", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job


class _Computation:
    """One computation in a thread of a runner."""

    def __init__(self, compute: Compute) -> None:
        self._compute: Compute | None = compute
        self._thread: threading.Thread | None = None
        self._turn = threading.Semaphore(0)  # the thread may run
        self._caller = threading.Semaphore(0)  # the caller may run
        self._is_abandoned = False
        self._num_layers = 0  # that it has reached
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        compute, self._compute, self._thread = self._compute, None, threading.current_thread()
        try:
            if compute is not None and not self._is_abandoned:
                self.result = compute()
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self.error = error
        finally:
            del compute  # the thread stays, and would keep what it holds
            self.is_done = True
            self._caller.release()

    def wait(self) -> None:
        """Until the next layer, or the end."""
        self._caller.acquire()

    def advance(self) -> None:
        """Run up to the next layer, or to the end."""
        self._turn.release()
        self.wait()

    def abandon(self) -> None:
        """End the computation, which frees what it holds."""
        if self.is_done or sys.is_finalizing():  # then threads do not run any more
            return
        self._is_abandoned = True
        if self._thread is not None:
            self.advance()

    def reach_layer(self, module: nn.Module, arguments: Any) -> None:
        """Before a layer, in any thread: the caller's turn, unless it is the first one."""
        if threading.current_thread() is not self._thread:
            return
        self._num_layers += 1
        if self._num_layers > 1:
            self._caller.release()
            self._turn.acquire()
            if self._is_abandoned:
                raise _Abandoned


class LayerThreads:
    """The threads of an encoder: as many as computations that were paused at once."""

    def __init__(self) -> None:
        self.idle: list[_Runner] = []
        weakref.finalize(self, _end, self.idle)

    def compute_by_layer(self, compute: Compute, layers: Sequence[nn.Module]) -> Generator[None, None, Any]:
        """Yield whenever `compute` is about to call another of `layers`. -> what it returns.
        `compute` runs in another thread, with nothing of the caller's that belongs to a thread."""
        computation = _Computation(compute)
        del compute
        runner, hooks = self._take_runner(), []
        try:
            hooks += [layer.register_forward_pre_hook(computation.reach_layer) for layer in layers]
            runner.jobs.put(computation.run)
            computation.wait()
            while not computation.is_done:
                yield
                computation.advance()
            if computation.error is not None:
                raise computation.error
            return computation.result
        finally:
            for hook in hooks:
                hook.remove()
            computation.abandon()
            self.idle.append(runner)

    def _take_runner(self) -> _Runner:
        while self.idle:
            if (runner := self.idle.pop()).is_alive():  # in a forked process it is not
                return runner
        runner = _Runner()
        runner.start()
        return runner


def _end(runners: Sequence[_Runner]) -> None:
    for runner in runners:
        runner.jobs.put(None)
