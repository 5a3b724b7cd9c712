"""`compute_by_layer`: a computation that stops after each layer, and goes on when it is asked to.

transformers' encoders compute all layers in one call. Here the call runs in a thread of its own,
which waits before each layer but the first while its caller does something else: one of the two
runs at a time. So the layers compute what they would in one go, with the same bits. Used by
`TransformersEncoders`. Must not know an architecture or a modality.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import nn

Compute = Callable[[], Any]


class _Abandoned(BaseException):
    """The rest of the computation is not wanted; no handler of `Exception` stops it."""


class _Worker(threading.Thread):
    """The thread of one computation."""

    def __init__(self, compute: Compute) -> None:
        super().__init__(name="encoder layers", daemon=True)
        self._compute = compute
        self._turn = threading.Semaphore(0)  # the thread may run
        self._caller = threading.Semaphore(0)  # the caller may run
        self._is_abandoned = False
        self._num_layers = 0  # that it has reached
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self._turn.acquire()
        try:
            if not self._is_abandoned:
                self.result = self._compute()
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self.error = error
        finally:
            self.is_done = True
            self._caller.release()

    def advance(self) -> None:
        """Run up to the next layer, or to the end."""
        self._turn.release()
        self._caller.acquire()

    def abandon(self) -> None:
        """End the thread, which frees what it holds."""
        if self.ident is None or sys.is_finalizing():  # it never started, or threads do not run any more
            return
        if not self.is_done:
            self._is_abandoned = True
            self.advance()
        self.join()

    def reach_layer(self, module: nn.Module, arguments: Any) -> None:
        """Before a layer, in any thread: the caller's turn, unless it is the first one."""
        if threading.current_thread() is not self:
            return
        self._num_layers += 1
        if self._num_layers > 1:
            self._caller.release()
            self._turn.acquire()
            if self._is_abandoned:
                raise _Abandoned


def compute_by_layer(compute: Compute, layers: Sequence[nn.Module]) -> Generator[None, None, Any]:
    """Yield whenever `compute` is about to call another of `layers`. -> what it returns. `compute`
    runs in another thread, with nothing of the caller's that belongs to a thread."""
    worker = _Worker(compute)
    hooks = []
    try:
        hooks += [layer.register_forward_pre_hook(worker.reach_layer) for layer in layers]
        worker.start()
        worker.advance()
        while not worker.is_done:
            yield
            worker.advance()
        if worker.error is not None:
            raise worker.error
        return worker.result
    finally:
        for hook in hooks:
            hook.remove()
        worker.abandon()
