"""`CopyThread`: runs copies on a stream of its own, piece after piece.

Used by `PoolBlockMover` on devices with streams. Must not know what is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from frame.core.interfaces.platform import DeviceEvent, Platform, SupportsStreams
from frame.core.interfaces.runner import DeviceLost

_MAX_QUEUED = 1  # pieces on the device beside the one that the thread prepares


class CopyThread:
    """Calls `run_piece` while it has work. `run_piece` queues a piece on the current stream and
    returns what is called once it has ended; None: there is no piece now."""

    def __init__(self, platform: Platform, streams: SupportsStreams, run_piece: Callable[[], Callable[[], None] | None]) -> None:
        self._platform = platform
        self._streams = streams
        self._run_piece = run_piece
        self.stream = streams.create_stream()
        self._queued: deque[tuple[DeviceEvent, Callable[[], None]]] = deque()
        self._is_woken = threading.Event()
        self._is_closing = False
        self._error: BaseException | None = None
        self.stream.wait_stream(streams.get_current_stream())  # which clears the staging buffer
        self._thread = threading.Thread(target=self._run, name="kv-tier-copies", daemon=True)
        self._thread.start()

    def mark_steps(self) -> DeviceEvent:
        """The end of all that this thread has queued on its current stream."""
        event = self._streams.create_event()
        event.record(self._streams.get_current_stream())
        return event

    def wake(self) -> None:
        """There is a piece."""
        self._is_woken.set()

    def raise_error(self) -> None:
        """Raise the error that has ended the thread: DeviceLost where the device has failed."""
        if isinstance(self._error, torch.AcceleratorError):
            raise DeviceLost(f"the device failed in a copy of the KV cache: {self._error}") from self._error
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the pieces on the device, and end the thread."""
        self._is_closing = True
        self._is_woken.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._platform.activate()
            self._streams.set_stream(self.stream)
            while not self._is_closing:
                self._run_next()
            self._wait_for_queued(0)
        except BaseException as error:  # noqa: BLE001 - `raise_error` raises it where the engine ends
            self._error = error

    def _run_next(self) -> None:
        done = self._run_piece()
        if done is not None:
            event = self._streams.create_event()
            event.record(self.stream)
            self._queued.append((event, done))
            self._wait_for_queued(_MAX_QUEUED)
        elif self._queued:
            self._wait_for_queued(len(self._queued) - 1)
        else:
            self._is_woken.wait()
            self._is_woken.clear()

    def _wait_for_queued(self, maximum: int) -> None:
        while len(self._queued) > maximum:
            event, done = self._queued.popleft()
            event.synchronize()
            done()
