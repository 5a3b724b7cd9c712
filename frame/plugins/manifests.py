"""Guards the reading of a package's manifest, which runs its code in this process: names one that
hangs, ends the process or is slow, and keeps what it prints off standard output. Used by the
loader."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from frame.core.errors import EXIT_CONFIGURATION

HANG_SECONDS = 10.0
SLOW_SECONDS = 1.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def guarded(manifest: str, may_be_slow: bool = False) -> Iterator[None]:
    """Read a manifest in the body. `manifest` names its package, version and entry point.
    `may_be_slow`: it is a file that has the plugin itself, with the libraries that it uses.

    One that takes more than `HANG_SECONDS` ends the process with exit code 78: nothing can stop its
    code. One that calls `os._exit` gets SystemExit. One that crashes the process leaves a stack
    with its file on standard error. One that takes more than `SLOW_SECONDS` is logged. What it
    prints goes to standard error.
    """
    watchdog = threading.Timer(HANG_SECONDS, _end_process, [manifest])
    watchdog.daemon = True
    watchdog.start()
    began = time.monotonic()
    try:
        with contextlib.redirect_stdout(sys.stderr), _stack_of_a_crash(), _no_exit():
            yield
    finally:
        watchdog.cancel()
    seconds = time.monotonic() - began
    if seconds > SLOW_SECONDS and not may_be_slow:
        _log.warning(
            "%s takes %.1f s to import, at every start of a process; import libraries in the plugin's own module, not in its manifest",
            manifest,
            seconds,
        )


@contextlib.contextmanager
def _stack_of_a_crash() -> Iterator[None]:
    """Write the stack on a fatal signal, such as SIGSEGV."""
    if faulthandler.is_enabled():
        yield
        return
    with contextlib.suppress(RuntimeError, OSError, AttributeError):  # there is no standard error
        faulthandler.enable()
    try:
        yield
    finally:
        faulthandler.disable()


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Raise SystemExit where this thread calls `os._exit`, which would end the process without a
    word. Other threads and forked processes end as they ask."""
    right, reader = os._exit, (os.getpid(), threading.get_ident())

    def refuse(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != reader:
            right(status)
        raise SystemExit(f"it calls os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = right


def _end_process(manifest: str) -> None:
    sentence = (
        f"frame: {manifest} has not been read after {HANG_SECONDS:g} s; update or uninstall the package, or exclude it with plugins.deny"
    )
    os.write(2, f"{sentence}\n".encode())
    os._exit(EXIT_CONFIGURATION)
