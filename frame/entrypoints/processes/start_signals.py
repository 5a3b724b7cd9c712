"""`StartSignals`: SIGTERM and SIGINT end a server that starts, with exit code 0, and call the
handlers of one that runs.

Used by `frame serve` and `frame router`. Must not know what is being started.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from frame.entrypoints.logs import report


class StartSignals:
    """Handles the signals from its creation on; SIGHUP too where it means that the terminal is
    gone.

    A signal raises SystemExit in the main thread at once. After `hold` it is kept for `check`: an
    exception between any two instructions leaves locks taken, sockets open and processes without an
    owner, and is lost in a `__del__`.
    """

    def __init__(self) -> None:
        self._received: int | None = None  # the latest signal
        self._is_held = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGHUP, self._receive if is_on_terminal() else signal.SIG_IGN)

    def hold(self) -> None:
        """From now on raise in `check` and `released` only, and now for a signal that has come."""
        self._is_held = True
        self.check()

    @contextmanager
    def released(self) -> Iterator[None]:
        """A block, of a start that is held, that may take long and that a signal may end."""
        self._is_held = False
        try:
            self.check()
            yield
        finally:
            self._is_held = True

    def check(self) -> None:
        """Raise SystemExit if a signal has come; every `finally` ends children and sockets."""
        if self._received is not None:
            report(f"stopped by {signal.Signals(self._received).name} while starting")
            raise SystemExit(0)

    def forward(self, on_end: Callable[[], None], on_hang_up: Callable[[], None] | None = None) -> None:
        """From now on call `on_end` in this thread's event loop, also for a signal that has come.
        `on_hang_up`: what SIGHUP calls where it does not mean the end. Later than the loop's end
        signals do nothing, so that none interrupts what the process still has to end."""
        loop = asyncio.get_running_loop()

        def receive(number: int, frame: object) -> None:
            called = on_hang_up if number == signal.SIGHUP and not is_on_terminal() else on_end
            if called is not None and not loop.is_closed():
                loop.call_soon_threadsafe(called)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, receive)
        if self._received is not None:
            on_end()

    def _receive(self, number: int, frame: object) -> None:
        self._received = number
        if not self._is_held:
            self.check()


def is_on_terminal() -> bool:
    """Whether the process was started by hand, so that SIGHUP means the end of its terminal."""
    return os.isatty(0)
