"""Where a process hangs: the stacks of its threads on standard error, asked for by another process or by its own alarm.

They are written in C, so it does not matter what holds the interpreter. Knows no process and no loop.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from typing import IO


def answer_when_asked() -> None:
    """From now on `ask_where` makes this process write the stacks of its threads."""
    if hasattr(faulthandler, "register"):  # not on Windows
        with contextlib.suppress(RuntimeError, OSError, AttributeError):  # there is no standard error
            faulthandler.register(signal.SIGUSR1)


def ask_where(process: subprocess.Popen[bytes]) -> None:
    """Make a process that has called `answer_when_asked` say where it is."""
    if hasattr(signal, "SIGUSR1"):
        process.send_signal(signal.SIGUSR1)


class LoopAlarm:
    """Writes the stacks of this process when nobody has called `beat` for so many seconds; once, until the next one.

    `beat` waits for stacks that are just being written, so they go through an open file of their own that does not block.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # a socket, or a system without /proc
            self._file = open(os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND), "wb", buffering=0)  # noqa: SIM115, PTH123

    def beat(self) -> None:
        """The loop lives."""
        with contextlib.suppress(RuntimeError, OSError, AttributeError):  # as above
            faulthandler.dump_traceback_later(self._seconds, file=self._file or sys.stderr)

    def close(self) -> None:
        """Nothing beats any more."""
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
