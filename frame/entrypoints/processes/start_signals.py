"""`StartSignals`: SIGTERM and SIGINT end a server that starts, with exit code 0.

Used by `frame serve` until the event loop of the server has handlers of its own. Must not know what
is being started.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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
        """Raise SystemExit if a signal has come; it passes every `finally`, which ends children and
        sockets."""
        if self._received is not None:
            report(f"stopped by {signal.Signals(self._received).name} while starting")
            raise SystemExit(0)

    def take(self) -> bool:
        """Whether a signal has come; the caller handles it, `check` does not."""
        received, self._received = self._received, None
        return received is not None

    def _receive(self, number: int, frame: object) -> None:
        self._received = number
        if not self._is_held:
            self.check()


def is_on_terminal() -> bool:
    """Whether the process was started by hand, so that SIGHUP means the end of its terminal."""
    return os.isatty(0)
