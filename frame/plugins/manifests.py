"""Guards the reading of a package's manifest, which runs its code in this process: names one that
hangs or is slow, and keeps what it prints off standard output. Used by the loader."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

HANG_SECONDS = 10.0
SLOW_SECONDS = 1.0
EXIT_CONFIGURATION = 78  # sysexits' EX_CONFIG

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def guarded(manifest: str) -> Iterator[None]:
    """Read a manifest in the body. `manifest` names its package, version and entry point.

    One that takes more than `HANG_SECONDS` ends the process with exit code 78: nothing can stop its
    code. One that takes more than `SLOW_SECONDS` is logged. What it prints goes to standard error.
    """
    watchdog = threading.Timer(HANG_SECONDS, _end_process, [manifest])
    watchdog.daemon = True
    watchdog.start()
    began = time.monotonic()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        watchdog.cancel()
    seconds = time.monotonic() - began
    if seconds > SLOW_SECONDS:
        _log.warning(
            "%s takes %.1f s to import, at every start of a process; import libraries in the plugin's own module, not in its manifest",
            manifest,
            seconds,
        )


def _end_process(manifest: str) -> None:
    sentence = (
        f"frame: {manifest} has not been read after {HANG_SECONDS:g} s; update or uninstall the package, or exclude it with plugins.deny"
    )
    os.write(2, f"{sentence}\n".encode())
    os._exit(EXIT_CONFIGURATION)
