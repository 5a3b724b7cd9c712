"""Memory that a process owns and a child maps, so that its contents outlive the child. It is a file
without a name, which ends with the last process that has it, and leaves nothing in /dev/shm.

Used by the process that starts ranks, and where their KV cache tiers are built. Must not know what
is kept.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

VARIABLE = "FRAME_KEPT_MEMORY"  # of a child's environment: `get_path` of the memory that its parent keeps for it
SECRET_BYTES = 32  # at its start, random
_NAME = f"frame-kept-{os.urandom(8).hex()}"  # in this process
_START = mmap.ALLOCATIONGRANULARITY  # of what is mapped


def create_memory() -> int | None:
    """The descriptor of new memory; None where the operating system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create(_NAME)
    except OSError:
        return None
    os.write(descriptor, os.urandom(SECRET_BYTES))
    return descriptor


def get_path(descriptor: int) -> str:
    """Where other processes of this user open memory of this process: a path and its name."""
    return f"/proc/{os.getpid()}/fd/{descriptor}:{_NAME}"


class KeptMemory:
    """Memory that another process keeps. Raises OSError where it cannot be opened."""

    def __init__(self, path: str) -> None:
        path, _, name = path.partition(":")
        if not Path(path).readlink().name.startswith(f"memfd:{name} "):
            raise OSError(f"{path} is another file")  # of another process with this number, perhaps in another container
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def secret(self) -> bytes:
        return os.pread(self._file, SECRET_BYTES, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes that are in memory now."""
        return os.fstat(self._file).st_blocks * 512

    def map(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], with the contents that earlier processes left; zeros beyond. Pages
        that are never written do not become resident."""
        import numpy as np  # the process that creates memory needs none

        os.ftruncate(self._file, max(_START + num_bytes, os.fstat(self._file).st_size))
        return np.frombuffer(mmap.mmap(self._file, num_bytes, offset=_START), np.uint8)


def open_kept() -> KeptMemory | None:
    """The memory that this process's parent keeps for it; None: there is none."""
    path = os.environ.get(VARIABLE)
    return KeptMemory(path) if path else None
