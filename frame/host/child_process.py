"""Starts a process that ends with its parent.

Used for the text processes and by launchers of ranks. The command gets the parent's process id, and
whether to ask the kernel for a signal at the parent's end; `die_with_parent` reads them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from frame.host.interpreter import child_environment

EXIT_ORPHANED = 3
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # handled by the parent only
PR_SET_PDEATHSIG = 1


def start_process(command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> subprocess.Popen[bytes]:
    """Start `command` with a pipe as its input and no standard output. `environment` is added to
    this process's own. Raises OSError."""
    # Blocked until the child ignores them, so that a signal to the process group does not end it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        return subprocess.Popen(
            [*command, "--parent", str(os.getpid()), *_death_signal()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if pipes_errors else None,
            env=child_environment(environment),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to end this process when the parent's thread that started it ends."""
    if not sys.platform.startswith("linux"):
        return
    library: Any = ctypes.CDLL(None, use_errno=True)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request took effect
        raise SystemExit(EXIT_ORPHANED)


def open_replies(parent: int) -> int:
    """Make this process a child of `parent` that replies through its standard output. -> the
    descriptor of the replies; the output of libraries goes to the log."""
    die_with_parent(parent)
    for number in PARENTS_SIGNALS:  # the terminal sends them to the whole process group
        signal.signal(number, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


def is_stopped(pid: int) -> bool:
    """Whether the operating system keeps a process of this host stopped (SIGSTOP)."""
    import psutil  # takes as long as the other imports of an early process together

    with contextlib.suppress(psutil.Error, OSError):  # OSError: no descriptor is free to read its state
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _death_signal() -> list[str]:
    # The kernel sends the signal when the thread that started the child ends; only the main thread
    # ends with the process.
    return ["--death-signal"] if threading.current_thread() is threading.main_thread() else []
