"""Stack dumps of a process that hangs, on standard error: requested by another process, or by the
process's own watchdog.

faulthandler writes them in C, so they work while another thread holds the interpreter lock. Used by
the supervisor and the servers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from typing import IO

DUMP_SIGNAL = signal.SIGUSR1


def enable_stack_dumps() -> None:
    """Make this process write the stacks of its threads when it gets `DUMP_SIGNAL`."""
    with contextlib.suppress(RuntimeError, OSError, AttributeError):  # there is no standard error
        faulthandler.register(DUMP_SIGNAL)


class LoopWatchdog:
    """Writes the stacks of this process once when `reset` was not called for `seconds`. `reset`
    waits for a dump in progress, so dumps go to a separate, non-blocking file descriptor."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # a socket, or a system without /proc
            self._file = open(os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND), "wb", buffering=0)  # noqa: SIM115, PTH123

    def reset(self) -> None:
        """Start the time again; the event loop calls this."""
        with contextlib.suppress(RuntimeError, OSError, AttributeError):  # as above
            faulthandler.dump_traceback_later(self._seconds, file=self._file or sys.stderr)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
