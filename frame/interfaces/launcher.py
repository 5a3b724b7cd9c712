"""`Launcher`: places the ranks of a model on hosts and devices, starts and ends their processes.

Used by the server and the offline engine in their main process; imports no torch. The server checks
each rank's process (`RankProcess.poll`), and starts all ranks again when one has ended. Must not
know requests, models or devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from pydantic import BaseModel

from frame.core.interfaces.plugin import Reason


@dataclass(frozen=True, slots=True)
class LauncherRequirements:
    """What a configuration requires of a launcher."""

    size: int  # ranks
    num_hosts: int = 1
    has_address: bool = False  # parallel.dist_init_addr is set


@dataclass(frozen=True, slots=True)
class LauncherCapabilities:
    """What a launcher can do."""

    several_hosts: bool = False  # it starts ranks on other hosts than its own
    max_size: int | None = None  # ranks; None: any number
    finds_hosts: bool = False  # it needs no parallel.dist_init_addr for several hosts

    def unsupported(self, requirements: LauncherRequirements) -> list[Reason]:
        reasons = []
        if self.max_size is not None and requirements.size > self.max_size:
            reasons.append(Reason(f"starts at most {self.max_size} rank(s), not {requirements.size}", f"parallel.tp: {self.max_size}"))
        if requirements.num_hosts > 1 and not self.several_hosts:
            reasons.append(Reason(f"starts ranks on this host only, not on {requirements.num_hosts}"))
        elif requirements.num_hosts > 1 and not (self.finds_hosts or requirements.has_address):
            reasons.append(Reason("set parallel.dist_init_addr to HOST:PORT of the first host, on every host"))
        return reasons


# Unix sockets in the folder of a launcher's context, which a launcher of several hosts connects:
# those that the process of a rank binds, and those of rank 0 that the others connect to.
RANK_SOCKETS = ("rank-{rank}", "rank-{rank}-out", "batches-{rank}")
SHARED_SOCKETS = ("rank-replies", "rank-results")


@dataclass(frozen=True, slots=True)
class LauncherContext:
    """`size`: ranks. `folder`: private to this engine and its user, for sockets and files; only
    processes of this host see it. `num_hosts`, `host_rank`: this host's place among the hosts.
    `address`: "host:port" where the hosts meet, of the first one. `take_early`: gives a command,
    environment and `pipes_errors` (as of `Launcher.start`) to a process of this host that was
    started before them, and returns it; returns None if none can run the command. A launcher need
    not call it."""

    size: int
    folder: Path
    num_hosts: int = 1
    host_rank: int = 0
    address: str = ""
    take_early: Callable[[Sequence[str], Mapping[str, str], bool], RankProcess | None] | None = None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank. `host`: the address that the other ranks reach it at; `local_index`:
    of its device among those of the host."""

    rank: int
    host: str
    local_index: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of all ranks, by rank, and the address where they meet (`CollectiveContext`)."""

    ranks: tuple[RankPlace, ...]
    rendezvous: str  # "file:///path", or "tcp://host:port" of rank 0's host


class RankProcess(Protocol):
    """A rank's process, or what stands for it on this host; `subprocess.Popen` has these methods.
    What stands for a process of another host may have `is_stopped`: whether the operating system
    keeps it stopped (SIGSTOP).

    The rank reads its configuration from `stdin`, and ends when `stdin` is closed.
    """

    pid: int
    stdin: IO[bytes] | None
    stderr: IO[bytes] | None  # None unless errors are piped

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. Returns at once."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """SIGUSR1 makes it write its stacks to standard error."""

    def kill(self) -> None:
        """End it at once."""


class Launcher(ABC):
    """Starts the ranks of one engine, again after each failure."""

    def __init__(self, context: LauncherContext, options: BaseModel | None = None) -> None:
        self.context = context
        self.options = options

    @abstractmethod
    def place(self) -> Placement:
        """Called before each start of the ranks, none of which runs. The rendezvous must be new:
        left-overs of the previous start would connect to it."""

    @abstractmethod
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        """Start one rank's command, with `environment` added to the inherited one. SIGINT, SIGTERM
        and SIGHUP are blocked in the process, which unblocks them itself; others are as in the
        caller. No other process holds the rank's `stdin`. Raises OSError."""

    def serve_node(self) -> None:
        """On another host than the first: run the ranks that the first one asks for, until it ends.
        Launchers of several hosts implement it."""
        raise NotImplementedError(f"{type(self).__name__} runs no ranks for another host")

    def close(self) -> None:
        """Called after the end of the last rank."""
