"""Waits for file descriptors of any number: `select.select` refuses those above 1,023, which a
process with as many connections has.

Used by the main process and the engine for pipes of their children, and by the log. Must not know
what is read or written.
"""

from __future__ import annotations

import math
import select

MAX_MILLISECONDS = (1 << 31) - 1  # that `poll` takes: 24 days


def wait_readable(handle: int, seconds: float = math.inf) -> bool:
    """Whether a descriptor can be read, or its other end is closed, within so many seconds."""
    return _wait(handle, select.POLLIN, seconds)


def wait_writable(handle: int, seconds: float = math.inf) -> bool:
    """Whether a descriptor can be written, or its other end is closed, within so many seconds."""
    return _wait(handle, select.POLLOUT, seconds)


def _wait(handle: int, event: int, seconds: float) -> bool:
    watched = select.poll()
    watched.register(handle, event)
    return bool(watched.poll(None if math.isinf(seconds) else min(MAX_MILLISECONDS, math.ceil(1e3 * max(0.0, seconds)))))
