"""What a process holds (memory, threads, open files), read from outside of it, and when that is too much. Knows no restart.

Linux tells it in /proc; elsewhere nothing is known, and nothing is limited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.errors import ConfigurationError

if TYPE_CHECKING:
    from frame.core.config.schema import ServerSection

log = logging.getLogger(__name__)

WARN_AT = 0.8  # of a limit


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds. `memory`: resident bytes of its own (of mapped files, such as weights, there is one copy for all, which the
    system takes back when it needs to). `device_memory`: bytes of the GPU, as the process itself tells."""

    memory: int = 0
    threads: int = 0
    files: int = 0
    device_memory: int = 0


@dataclass(frozen=True, slots=True)
class UsageLimits:
    """The most that one process may hold; None: no limit."""

    memory: int | None = None
    threads: int | None = None
    files: int | None = None
    device_memory: int | None = None


# field -> (its setting, what it is called in a sentence)
LIMITED = {
    "memory": ("server.max_process_memory", "{} of memory"),
    "threads": ("server.max_process_threads", "{} threads"),
    "files": ("server.max_process_files", "{} open files"),
    "device_memory": ("server.max_device_memory", "{} of device memory"),
}


def read_usage(pid: int) -> Usage | None:
    """None when the process is gone, or the system does not tell."""
    folder = Path(f"/proc/{pid}")
    try:
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split() for name, _, value in lines}
        kilobytes = int(status["RssAnon"][0]) + int(status["RssShmem"][0])
        return Usage(kilobytes * 1024, int(status["Threads"][0]), sum(1 for _ in (folder / "fd").iterdir()))
    except (OSError, KeyError, IndexError, ValueError):
        return None


class UsageWatch:
    """Looks at processes, remembers what each holds (`held`, by name), and warns once when it comes near a limit or passes it."""

    def __init__(self, limits: UsageLimits, warn: Callable[[str], None], read: Callable[[int], Usage | None] = read_usage) -> None:
        self.held: dict[str, Usage] = {}
        self._limits = limits
        self._warn = warn
        self._read = read
        self._warned: dict[str, tuple[int, frozenset[str]]] = {}  # process -> its pid, and what was said of it

    def look(self, name: str, pid: int, device_memory: int = 0) -> str | None:
        """A sentence, if the process holds more than it may."""
        usage = self._read(pid)
        if usage is None:
            self.held.pop(name, None)
            return None
        self.held[name] = usage = replace(usage, device_memory=device_memory)
        of, said = self._warned.get(name, (pid, frozenset()))
        said = said if of == pid else frozenset()
        excess = None
        for each in fields(UsageLimits):
            limit, amount = getattr(self._limits, each.name), getattr(usage, each.name)
            if limit is None or amount < WARN_AT * limit:
                continue
            setting, words = LIMITED[each.name]
            sentence = f"the {name} process holds {words.format(_amount(each.name, amount))}"
            allowed = f"{setting} ({_amount(each.name, limit)})"
            if each.name not in said:
                self._warn(f"{sentence}, {amount / limit:.0%} of {allowed}")
                said |= {each.name}
            if amount > limit:
                excess = excess or f"{sentence}, more than {allowed}"
        self._warned[name] = (pid, said)
        return excess


def watch_over(pids: Mapping[str, int], server: ServerSection) -> UsageWatch:
    """The watch over a server's processes. Raises ConfigurationError when one holds more from the start than it may."""
    limits = UsageLimits(server.max_process_memory, server.max_process_threads, server.max_process_files, server.max_device_memory)
    watch = UsageWatch(limits, log.warning)
    for name, pid in pids.items():
        excess = watch.look(name, pid)
        if excess is not None:
            raise ConfigurationError(f"{excess}, and has served nothing yet; allow it more")
    return watch


def _amount(field: str, amount: int) -> str:
    """A number of bytes or things, as people write it."""
    if field in ("threads", "files"):
        return str(amount)
    return f"{amount / 1e9:.2f} GB" if amount >= 1e9 else f"{amount / 1e6:.0f} MB"
