"""Host memory: the amount that this process may use, and the C library's policy for freed memory.

Used by the KV cache capacity on the CPU, by the hardware probe and by the grammar compiler. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt, from glibc's malloc.h
_DONTNEED, _HUGEPAGE, _POPULATE_WRITE = 4, 14, 23  # advice of Linux's madvise
_KEPT_BYTES = 256 << 20
_LARGEST_KEPT = 32 << 20  # the maximum that glibc accepts


def keep_freed_memory() -> None:
    """Make glibc keep up to `_KEPT_BYTES` of freed memory for the next step.

    By default glibc returns large activations to the system after each use, and the kernel maps and
    zeroes their pages again: a third of the time of a prompt. No effect without glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Return freed memory to the system, which glibc keeps where it lies between memory in use.
    Takes some 10 ms for each GB. No effect without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


def drop_pages(address: int, size: int) -> int:
    """Return the whole pages of a range to the system (`MADV_DONTNEED`). They stay mapped: pages of
    the process alone read as zeros then, those of a file as the file. -> the bytes of the pages.
    Raises OSError, and where there is no madvise."""
    return _advise(address, size, _DONTNEED)


def allocate_pages(size: int) -> mmap.mmap:
    """Private memory of zeros whose pages are in memory already, large ones where the system has
    them. Other threads run meanwhile."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for advice in (_HUGEPAGE, _POPULATE_WRITE):  # Linux 5.14 for the second one
        with contextlib.suppress(OSError):
            _advise(address, size, advice)
    return memory


def _advise(address: int, size: int, advice: int) -> int:
    """madvise for the whole pages of a range. -> their bytes. Raises OSError."""
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        raise OSError("this system has no madvise")
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0:
        return 0
    if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")
    return length


def measure_host_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> tuple[int, int]:
    """(total, available) in bytes: of the machine, or less if a control group (v1 or v2) of this
    process sets a limit."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for group, (limit, usage, reclaimable) in _memory_groups(cgroups, membership):
        maximum = _read(group / limit)
        if maximum.isdigit():  # else "max"
            held = int(_read(group / usage) or 0) - _statistic(group, reclaimable)
            total, available = min(total, int(maximum)), min(available, int(maximum) - max(0, held))
    return total, max(0, available)


def _memory_groups(cgroups: Path, membership: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The control groups that limit this process's memory, innermost first, with the names of their
    files. In a container the root is its own group, whatever path the kernel reports."""
    for line in _read(membership).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        innermost = root / path.lstrip("/")
        for group in (innermost, *innermost.parents):
            if group.is_relative_to(root) and group.is_dir():
                yield group, names


def _statistic(group: Path, name: str) -> int:
    for line in _read(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
