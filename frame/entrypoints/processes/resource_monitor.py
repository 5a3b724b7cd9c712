"""`ResourceMonitor`: reads the memory, threads and open files of processes from /proc and compares
them with limits.

Used by the supervisor and the metrics. On systems without /proc nothing is measured or limited.
Must not know a restart.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.errors import ConfigurationError

if TYPE_CHECKING:
    from frame.config.server_sections import ServerSection

log = logging.getLogger(__name__)

WARN_AT = 0.8  # fraction of a limit


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process."""

    memory: int = 0  # bytes: anonymous, shared and swapped memory, without mapped files such as weights, which the system can reclaim
    threads: int = 0
    files: int = 0  # open file descriptors
    device_memory: int = 0  # bytes on the GPU, as the process reports them


@dataclass(frozen=True, slots=True)
class UsageLimits:
    """The most that one process may use; None: no limit."""

    memory: int | None = None
    threads: int | None = None
    files: int | None = None
    device_memory: int | None = None


# field -> (its setting, its name in a sentence)
LIMITED = {
    "memory": ("server.max_process_memory", "{} of memory"),
    "threads": ("server.max_process_threads", "{} threads"),
    "files": ("server.max_process_files", "{} open files"),
    "device_memory": ("server.max_device_memory", "{} of device memory"),
}


def read_usage(pid: int, processes: Path = Path("/proc")) -> Usage | None:
    """The usage of a process; None if it has ended or the system has no /proc."""
    folder = processes / str(pid)
    try:
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split() for name, _, value in lines}
        kilobytes = int(status["RssAnon"][0]) + int(status["RssShmem"][0]) + int(status.get("VmSwap", ["0"])[0])
        return Usage(kilobytes * 1024, int(status["Threads"][0]), sum(1 for _ in (folder / "fd").iterdir()))
    except (OSError, KeyError, IndexError, ValueError):
        return None


class ResourceMonitor:
    """Measures processes (`usage`, by name); warns once for each limit that is near."""

    def __init__(self, limits: UsageLimits, warn: Callable[[str], None], read: Callable[[int], Usage | None] = read_usage) -> None:
        self.usage: dict[str, Usage] = {}
        self._limits = limits
        self._warn = warn
        self._read = read
        self._warned: dict[str, tuple[int, frozenset[str]]] = {}  # process -> its pid, and the fields that were warned of
        self._is_main_reported = False  # that it exceeds a limit

    def check_process(self, name: str, pid: int, device_memory: int = 0) -> str | None:
        """Measure a process. Returns a sentence if it exceeds a limit, else None."""
        usage = self._read(pid)
        if usage is None:
            self.usage.pop(name, None)
            return None
        self.usage[name] = usage = replace(usage, device_memory=device_memory)
        warned_pid, warned = self._warned.get(name, (pid, frozenset()))
        warned = warned if warned_pid == pid else frozenset()
        excess = None
        for each in fields(UsageLimits):
            limit, amount = getattr(self._limits, each.name), getattr(usage, each.name)
            if limit is None or amount < WARN_AT * limit:
                continue
            setting, words = LIMITED[each.name]
            sentence = f"the {name} process holds {words.format(_amount(each.name, amount))}"
            allowed = f"{setting} ({_amount(each.name, limit)})"
            if each.name not in warned:
                self._warn(f"{sentence}, {amount / limit:.0%} of {allowed}")
                warned |= {each.name}
            if amount > limit:
                excess = excess or f"{sentence}, more than {allowed}"
        self._warned[name] = (pid, warned)
        return excess

    def check_main_process(self) -> None:
        """Measure this process, which is not restarted; warns once when it exceeds a limit."""
        excess = self.check_process("main", os.getpid())
        if excess is not None and not self._is_main_reported:
            self._is_main_reported = True
            self._warn(f"{excess}; the main process is not restarted, because requests would be lost: restart the server")


def start_monitor(pids: Mapping[str, int], server: ServerSection) -> ResourceMonitor:
    """The monitor of a server's processes. Raises ConfigurationError at an excess."""
    limits = UsageLimits(server.max_process_memory, server.max_process_threads, server.max_process_files, server.max_device_memory)
    monitor = ResourceMonitor(limits, log.warning)
    for name, pid in pids.items():
        excess = monitor.check_process(name, pid)
        if excess is not None:
            raise ConfigurationError(f"{excess}, before it has served any request; raise the limit")
    return monitor


def _amount(field: str, amount: int) -> str:
    """A count, or a number of bytes in MB or GB."""
    if field in ("threads", "files"):
        return str(amount)
    return f"{amount / 1e9:.2f} GB" if amount >= 1e9 else f"{amount / 1e6:.0f} MB"
