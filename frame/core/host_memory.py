"""What the C library does with memory that a step gave back, on the CPU. Knows no tensor."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, as glibc's malloc.h has them
_KEPT_BYTES = 256 << 20
_LARGEST_KEPT = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, for the next step, up to `_KEPT_BYTES`.

    Otherwise it returns the larger activations to the system after each use, and each page of them is mapped and zeroed anew: a third
    of the time of a prompt. Without glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
