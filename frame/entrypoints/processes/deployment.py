"""`Deployment`: the child processes of a server or engine: start, liveness, restart, exit codes,
stop. Children end with their parent.

A child reads the resolved configuration from standard input, as one line of JSON; further lines are
new log settings. The input stays open: when it closes, the parent has ended. Must not know a
request; `frame.entrypoints.processes.supervisor` decides when to restart.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from frame.config.resolved import Resolved
from frame.config.server_sections import LogSection
from frame.core.errors import EXIT_CONFIGURATION, ConfigurationError
from frame.core.ipc.inflight_file import INFLIGHT, INFLIGHT_TEXT, read_inflight
from frame.core.ipc.transport import ZmqSender, ZmqTransport
from frame.core.messages import Control, Fatal, Heartbeat, Message, Ready, StartDetokenize
from frame.entrypoints.logs import configured_writer
from frame.entrypoints.processes.early_process import EarlyProcess, Standby
from frame.entrypoints.processes.hang_dump import DUMP_SIGNAL
from frame.host.child_process import is_stopped, start_process
from frame.host.host_memory import measure_host_memory
from frame.host.interpreter import python_command
from frame.host.kept_memory import VARIABLE as KEPT_MEMORY
from frame.host.kept_memory import create_memory, get_path
from frame.host.socket_directory import SocketDirectory
from frame.interfaces.launcher import Launcher, LauncherContext, Placement, RankProcess
from frame.plugins.registry import Registry

STANDBY_BYTES = 1 << 30  # of host memory for a process of a restart, and four times as much for all else
LOG_TIMEOUT = 0.5  # seconds to relay the last log lines of children that ended


@dataclass(frozen=True, slots=True)
class Layout:
    """The child processes to start."""

    ranks: int  # of the model
    detokenizer: bool
    tokenizers: int
    module: str = "frame.entrypoints.processes.worker"  # tests run engines with fake models instead
    replica: int | None = None  # number of this replica; None: there is one
    early: EarlyProcess | None = None  # may become rank 0
    standby: bool = False  # keep processes for a restart of the ranks

    @property
    def first_device(self) -> int:
        """The number of devices that the replicas before this one have."""
        return self.ranks * (self.replica or 0)


@dataclass(slots=True)
class Child:
    """A process, replaced under the same name when it is restarted."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    rank: int | None = None  # of a rank
    process: RankProcess = field(init=False)
    is_ready: bool = False
    silence: float = 0.0  # seconds without a heartbeat
    stopped: float = 0.0  # seconds that the operating system has kept it stopped (SIGSTOP)
    start: dict[str, Any] = field(default_factory=dict)  # the data of its Ready message
    last_error: str | None = None  # of its Fatal message
    device_memory: int = 0  # bytes, from its last heartbeat
    is_local: bool = True  # it runs on this host
    is_dump_requested: bool = False  # it hangs and was asked for its stacks

    @property
    def is_rank(self) -> bool:
        """Whether it runs the model. All ranks start and end together, because a rank cannot join a
        running group."""
        return self.name == "engine" or self.name.startswith("rank-")

    @property
    def has_heartbeat(self) -> bool:
        return not self.name.startswith("rank-")  # rank 0 waits for the others, so its heartbeats stop with theirs

    @property
    def local_pid(self) -> int:
        """Its process id on this host; 0 if it runs on another one."""
        return self.process.pid if self.is_local else 0

    @property
    def is_stopped(self) -> bool:
        """Whether the operating system keeps the process stopped."""
        return is_stopped(self.process.pid) if self.is_local else bool(getattr(self.process, "is_stopped", False))

    def describe_exit(self) -> str | None:
        """How the process ended, as a sentence; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} process {how}" + (f" ({self.last_error})" if self.last_error else "")


class Deployment:
    """The children in the order of their start, and the transport to them. A restarted child has
    the same addresses. `waiting` is entered while the launcher waits for other hosts."""

    def __init__(
        self,
        resolved: Resolved,
        layout: Layout,
        registry: Registry,
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.layout = layout
        self._waiting = waiting
        try:
            self._sockets = SocketDirectory()
        except OSError as error:
            raise ConfigurationError(f"the folder for sockets cannot be created ({error}); free disk space, or set TMPDIR") from error
        self._resolved = resolved
        self._standby = Standby(layout.early)
        self._launcher = create_launcher(resolved, registry, layout.ranks, self._sockets.path, self._standby)
        self._placement: Placement | None = None  # of the ranks' latest start
        self.children: dict[str, Child] = {}
        writer = configured_writer()
        self._log = None if writer is None or writer.isatty() else writer  # on a terminal, children draw their own progress bars
        self._relays: dict[str, threading.Thread] = {}  # by name of the child
        address = self._sockets.address
        routes: dict[type[Message], str] = {}
        if layout.detokenizer:
            routes = {StartDetokenize: address("detokenizer")}
        names = [choice.name for choice in resolved.plugins.get("kv_tier", ())]
        self._keeps = any(getattr(registry.get("kv_tier", name).capabilities, "keeps", False) for name in names)
        self._kept: list[int] = []  # descriptors of memory of ranks that outlives them
        self._plan(resolved)
        # This process binds no socket: libzmq aborts a process that has no descriptor left for an
        # accepted connection.
        self.transport = ZmqTransport(None, address("engine"), routes, sources=[address(f"{name}-out") for name in self.names])
        self.tokenizers = [ZmqSender(address(f"tokenizer-{i}")) for i in range(layout.tokenizers)]
        try:
            self.start_children(self.names)
        except BaseException:
            self.kill()
            raise

    def _plan(self, resolved: Resolved) -> None:
        threads = {"OMP_NUM_THREADS": str(resolved.threads)} if resolved.threads else {}
        engine = ["--detokenizer"] if self.layout.detokenizer else []
        group = ["--ranks", str(self.layout.ranks)]
        self._add("engine", "scheduler", *group, *engine, environment=threads, rank=0)
        for rank in range(1, self.layout.ranks):
            self._add(f"rank-{rank}", "follower", *group, "--rank", str(rank), environment=threads, rank=rank)
        if self.layout.detokenizer:
            self._add("detokenizer", "detokenizer")
        for i in range(self.layout.tokenizers):
            self._add(f"tokenizer-{i}", "tokenizer", "--rank", str(i))

    def _add(self, name: str, role: str, *arguments: str, environment: dict[str, str] | None = None, rank: int | None = None) -> None:
        command = python_command("-m", self.layout.module, role, "--sockets", str(self._sockets.path), *arguments)
        if self.layout.replica is not None:
            command += ["--replica", str(self.layout.replica)]
        environment = dict(environment or {})
        if rank is not None and self._keeps and (memory := create_memory()) is not None:
            self._kept.append(memory)
            environment[KEPT_MEMORY] = get_path(memory)
        self.children[name] = Child(name, command, environment, rank)

    def start_children(self, names: Sequence[str]) -> None:
        """Start these children, none of which may be running. Messages sent to their predecessors
        are dropped. Raises OSError, RuntimeError (no thread) or zmq.ZMQError; then none of them
        runs."""
        try:
            self._start([self.children[name] for name in names])
        except BaseException:
            self.kill_and_wait(names)
            raise

    def _start(self, children: Sequence[Child]) -> None:
        self._sockets.restore()
        if any(child.is_rank for child in children):
            (self._sockets.path / INFLIGHT).unlink(missing_ok=True)
            with self._waiting():
                self._placement = self._launcher.place()
        if any(child.name == "detokenizer" for child in children):
            (self._sockets.path / INFLIGHT_TEXT).unlink(missing_ok=True)
        for child in children:
            if child.name.startswith("tokenizer-"):
                self.tokenizers[int(child.name.removeprefix("tokenizer-"))].reconnect()
            else:
                self.transport.reconnect(self._sockets.address(child.name))
            child.is_ready, child.silence, child.last_error, child.device_memory, child.is_dump_requested = False, 0.0, None, 0, False
            child.stopped = 0.0
            self._spawn(child)

    def _spawn(self, child: Child) -> None:
        pipes_errors = self._log is not None
        if child.rank is None or self._placement is None:
            child.process = start_process(child.arguments, child.environment, pipes_errors=pipes_errors)
        else:
            place = self._placement.ranks[child.rank]
            child.is_local = place.host == self._placement.ranks[0].host
            device = self.layout.first_device + place.local_index
            where = ["--rendezvous", self._placement.rendezvous, "--host", place.host, "--local-index", str(device)]
            command = [*child.arguments, *where]
            child.process = self._launcher.start(place, command, child.environment, pipes_errors=pipes_errors)
        if self._log is not None and child.process.stderr is not None:
            self._relays[child.name] = self._log.relay(child.process.stderr)
        self._send_line(child, self._resolved)

    @staticmethod
    def _send_line(child: Child, content: BaseModel) -> None:
        if child.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended; `find_dead_child` reports that
                child.process.stdin.write(content.model_dump_json().encode() + b"\n")
                child.process.stdin.flush()

    def set_log_settings(self, settings: LogSection) -> None:
        """Apply log settings in the children, and in those that are started later."""
        user = self._resolved.user
        self._resolved = self._resolved.model_copy(update={"user": user.model_copy(update={"log": settings})})
        for child in self.children.values():
            self._send_line(child, settings)

    def set_weights(self, folder: str | None, version: str) -> None:
        """Have ranks that are started later load these weights. folder: None: they were not kept,
        so that those ranks wait for an update."""
        self._resolved = self._resolved.with_weights(folder, version)

    def prepare_standby(self) -> None:
        """Start the processes that the ranks of this host become when they are started again, if it
        has the memory."""
        if self.layout.standby and measure_host_memory()[1] > STANDBY_BYTES * (self.layout.ranks + 4):
            roles = ["follower" if child.rank else "scheduler" for child in self.children.values() if child.is_rank and child.is_local]
            self._standby.prepare([python_command("-m", self.layout.module, role) for role in roles], self._log is not None)

    def close_standby(self) -> None:
        """End the processes of `prepare_standby`: the ranks are not started again."""
        self._standby.close()

    def kill_and_wait(self, names: Sequence[str]) -> None:
        """Kill these children, started or not, and wait for their end."""
        children = [child for name in names if hasattr(child := self.children[name], "process")]
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
        for child in children:
            child.process.wait()
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()

    def kill_children(self, names: Sequence[str]) -> None:
        """Kill these children without waiting for their end."""
        for name in names:
            self.children[name].process.kill()

    def read_inflight(self) -> dict[int, int]:
        """Prefilled tokens by request hash of what was on the device at the engine's end."""
        return read_inflight(self._sockets.path / INFLIGHT)

    def read_inflight_text(self) -> frozenset[int]:
        """The hash of the request whose text was in progress at the detokenizer's end."""
        return frozenset(read_inflight(self._sockets.path / INFLIGHT_TEXT))

    @property
    def names(self) -> list[str]:
        """The names of all children; each reports ready."""
        return list(self.children)

    @property
    def pids(self) -> dict[str, int]:
        """Those of this host."""
        return {self.label(name): child.local_pid for name, child in self.children.items() if child.is_local}

    def label(self, name: str) -> str:
        """The name of a child among those of all replicas."""
        return name if self.layout.replica is None else f"replica-{self.layout.replica}-{name}"

    def handle_message(self, message: Message) -> None:
        """Record a child's Ready, Heartbeat or Fatal; other messages are ignored."""
        if not isinstance(message, Ready | Heartbeat | Fatal):
            return
        child = self.children.get(message.process)
        if child is None:
            return
        if isinstance(message, Ready):
            if message.pid == child.process.pid:  # else of the process before
                child.is_ready, child.start = True, message.data or {}
        elif isinstance(message, Heartbeat):
            child.device_memory = message.device_memory
        else:
            child.last_error = child.last_error or message.error
        child.silence, child.is_dump_requested = 0.0, False

    def request_stack_dump(self, name: str) -> None:
        """Have a child that hangs write its stacks to standard error."""
        self.children[name].is_dump_requested = True
        self.children[name].process.send_signal(DUMP_SIGNAL)

    def find_dead_child(self) -> str | None:
        """A sentence about the first child that has ended; None if all run."""
        for child in self.children.values():
            how = child.describe_exit()
            if how is not None:
                return f"{how}; the server cannot go on"
        return None

    def get_start_error(self) -> Exception | None:
        """The error of a start that has failed; None otherwise."""
        dead = self.find_dead_child()
        if dead is None:
            return None
        for message in self.transport.receive(0.5):  # the last errors
            self.handle_message(message)
        is_configuration = any(child.process.poll() == EXIT_CONFIGURATION for child in self.children.values())
        sentence = next((child.last_error for child in self.children.values() if child.last_error), dead)
        return ConfigurationError(sentence) if is_configuration else RuntimeError(sentence)

    def stop(self, timeout: float) -> None:
        """Ask the engine to stop, which stops its followers too; after at most `timeout` seconds
        kill what still runs."""
        deadline = time.monotonic() + timeout
        running = [child for child in self.children.values() if child.process.poll() is None]
        engine = self.children["engine"]
        if engine in running and engine.is_ready:  # a starting engine reads no messages
            self.transport.send(Control(id="stop", action="shutdown"))
            for child in running:
                if child.is_rank:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(max(0.1, deadline - time.monotonic()))
        self.kill()  # text processes have nothing to save

    def kill(self) -> None:
        """Kill all children and remove the sockets."""
        self._standby.close()
        self.kill_and_wait(self.names)
        deadline = time.monotonic() + LOG_TIMEOUT
        for relay in self._relays.values():
            relay.join(max(0.0, deadline - time.monotonic()))
        for sender in self.tokenizers:
            sender.close()
        self.transport.close()
        self._launcher.close()
        self._sockets.remove()
        while self._kept:
            os.close(self._kept.pop())


def create_launcher(resolved: Resolved, registry: Registry, ranks: int, folder: Path, standby: Standby | None = None) -> Launcher:
    """The launcher of an engine's ranks. Raises ConfigurationError."""
    parallel = resolved.user.parallel
    take = None if standby is None else standby.take
    context = LauncherContext(ranks, folder, parallel.nnodes, parallel.node_rank, parallel.dist_init_addr or "", take)
    launcher: Launcher = registry.create(resolved.choice("launcher"), context)
    return launcher
