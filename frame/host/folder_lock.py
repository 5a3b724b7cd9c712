"""`lock_folder`: the lock by which a process keeps a folder, until it ends. Used by rooms that
remove what processes that were killed have left. Must not know what a folder holds."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_folder(folder: Path, kind: int = fcntl.LOCK_EX) -> int:
    """A descriptor of the folder with the lock, which ends when it is closed. Raises OSError where
    another process has the lock, or where the path is a link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
