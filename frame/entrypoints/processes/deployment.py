"""`Deployment`: the child processes of one server or engine: start, liveness, restart, exit codes, stop. No child outlives its parent.

A child gets the resolved configuration on standard input, as one line of JSON; further lines are new settings of the log. The input
stays open: its end tells the child that the parent is gone.
Knows no request, and not when to restart (that is `frame.entrypoints.processes.supervisor`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from frame.core.config.resolved import Resolved
from frame.core.config.schema import LogSection
from frame.core.errors import ConfigurationError
from frame.core.ipc.inflight_file import INFLIGHT, INFLIGHT_TEXT, read_inflight
from frame.core.ipc.transport import SocketDirectory, ZmqSender, ZmqTransport
from frame.core.messages import Control, Fatal, Heartbeat, Message, Ready, StartDetokenize
from frame.entrypoints.logs import configured_writer
from frame.entrypoints.processes.hang_dump import ask_where

EXIT_ORPHANED = 3
EXIT_CONFIGURATION = 78  # sysexits' EX_CONFIG
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the parent decides what they mean
PR_SET_PDEATHSIG = 1
LAST_WORDS = 0.5  # seconds for the last lines of children that ended


def _death_signal() -> list[str]:
    # The kernel's signal comes when the starting thread ends, which only for the main thread means the process.
    return ["--death-signal"] if threading.current_thread() is threading.main_thread() else []


def die_with(parent: int) -> None:
    """Ask the kernel (Linux) to end this process when the parent's thread that started it ends."""
    if not sys.platform.startswith("linux"):
        return
    library: Any = ctypes.CDLL(None, use_errno=True)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request took effect
        raise SystemExit(EXIT_ORPHANED)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which processes there are beside this one."""

    tp: int
    detokenizer: bool
    tokenizers: int
    module: str = "frame.entrypoints.processes.worker"  # what is run; tests put engines with fake models here


@dataclass(slots=True)
class Child:
    """One process, and after its end the next one of the same name. `silence`: seconds without a heartbeat, as far as anybody looked;
    `device_memory`: bytes, as its last heartbeat told; `is_asked`: where it hangs."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    is_ready: bool = False
    silence: float = 0.0
    last_words: str | None = None
    device_memory: int = 0
    is_asked: bool = False

    @property
    def is_rank(self) -> bool:
        """Runs the model. Ranks cannot join others that are running: they start together and end together."""
        return self.name == "engine" or self.name.startswith("rank-")

    @property
    def beats(self) -> bool:
        return not self.name.startswith("rank-")  # those are silent with rank 0, which waits for them

    def how_it_ended(self) -> str | None:
        """A sentence, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} process {how}" + (f" ({self.last_words})" if self.last_words else "")


class Deployment:
    """Children in the order of their start, and the transport to them. A child's successor is reached at the same addresses."""

    def __init__(self, resolved: Resolved, layout: Layout) -> None:
        self.layout = layout
        try:
            self._sockets = SocketDirectory()
        except OSError as error:
            raise ConfigurationError(f"no folder for the processes' sockets can be made ({error}); make room, or set TMPDIR") from error
        self._resolved = resolved
        self.children: dict[str, Child] = {}
        writer = configured_writer()
        self._log = None if writer is None or writer.isatty() else writer  # on a terminal, children draw their own progress
        self._relays: dict[str, threading.Thread] = {}  # by the children's names
        address = self._sockets.address
        routes: dict[type[Message], str] = {}
        if layout.detokenizer:
            routes = {StartDetokenize: address("detokenizer")}
        self._plan(resolved)
        # This process accepts no connection, since libzmq would end it for want of a descriptor.
        self.transport = ZmqTransport(None, address("engine"), routes, sources=[address(f"{name}-out") for name in self.names])
        self.tokenizers = [ZmqSender(address(f"tokenizer-{i}")) for i in range(layout.tokenizers)]
        try:
            self.start(self.names)
        except BaseException:
            self.kill()
            raise

    def _plan(self, resolved: Resolved) -> None:
        threads = {"OMP_NUM_THREADS": str(resolved.threads)} if resolved.threads else {}
        engine = ["--detokenizer"] if self.layout.detokenizer else []
        self._add("engine", "scheduler", "--tp", str(self.layout.tp), *engine, environment=threads)
        for rank in range(1, self.layout.tp):
            self._add(f"rank-{rank}", "follower", "--tp", str(self.layout.tp), "--rank", str(rank), environment=threads)
        if self.layout.detokenizer:
            self._add("detokenizer", "detokenizer")
        for i in range(self.layout.tokenizers):
            self._add(f"tokenizer-{i}", "tokenizer", "--rank", str(i))

    def _add(self, name: str, role: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", self.layout.module, role, "--sockets", str(self._sockets.path), *arguments]
        self.children[name] = Child(name, command, environment or {})

    def start(self, names: Sequence[str]) -> None:
        """Start these children, which do not run. What was sent to those before them is dropped. Raises what the system refuses
        (OSError, RuntimeError for a thread, zmq.ZMQError), and then none of them runs."""
        try:
            self._start([self.children[name] for name in names])
        except BaseException:
            self.end(names)
            raise

    def _start(self, children: Sequence[Child]) -> None:
        self._sockets.restore()
        if any(child.is_rank for child in children):
            for left in (INFLIGHT, "ranks"):  # who was on the device; where the ranks met
                (self._sockets.path / left).unlink(missing_ok=True)
        if any(child.name == "detokenizer" for child in children):
            (self._sockets.path / INFLIGHT_TEXT).unlink(missing_ok=True)
        for child in children:
            self._renew(child.name)
            child.is_ready, child.silence, child.last_words, child.device_memory, child.is_asked = False, 0.0, None, 0, False
            self._spawn(child)

    def _spawn(self, child: Child) -> None:
        # Signals to the whole group must not end a child before it ignores them; a blocked one waits until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
        try:
            child.process = subprocess.Popen(
                [*child.arguments, "--parent", str(os.getpid()), *_death_signal()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=None if self._log is None else subprocess.PIPE,
                env={**os.environ, **child.environment},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self._log is not None and child.process.stderr is not None:
            self._relays[child.name] = self._log.relay(child.process.stderr)
        self._tell(child, self._resolved)

    @staticmethod
    def _tell(child: Child, what: BaseModel) -> None:
        if child.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it died; `dead` will say so
                child.process.stdin.write(what.model_dump_json().encode() + b"\n")
                child.process.stdin.flush()

    def tell_log(self, settings: LogSection) -> None:
        """Let the children, and those that come after them, log by these settings."""
        user = self._resolved.user
        self._resolved = self._resolved.model_copy(update={"user": user.model_copy(update={"log": settings})})
        for child in self.children.values():
            self._tell(child, settings)

    def _renew(self, name: str) -> None:
        if name.startswith("tokenizer-"):
            self.tokenizers[int(name.removeprefix("tokenizer-"))].renew()
        else:
            self.transport.renew(self._sockets.address(name))

    def end(self, names: Sequence[str]) -> None:
        """Kill these children, whatever state they are in, and wait for their ends."""
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
        """Kill these children, and do not wait for their ends."""
        for name in names:
            self.children[name].process.kill()

    def inflight(self) -> dict[int, int]:
        """Prefilled tokens by the marks of the requests that the engine has on the device, also after its end."""
        return read_inflight(self._sockets.path / INFLIGHT)

    def inflight_text(self) -> frozenset[int]:
        """The mark of the request whose text the detokenizer is making, also after its end."""
        return frozenset(read_inflight(self._sockets.path / INFLIGHT_TEXT))

    @property
    def names(self) -> list[str]:
        """The processes that report ready."""
        return list(self.children)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self.children.items()}

    def note(self, message: Message) -> None:
        """Take in what a child says of itself."""
        if not isinstance(message, Ready | Heartbeat | Fatal):
            return
        child = self.children.get(message.process)
        if child is None:
            return
        if isinstance(message, Ready):
            child.is_ready = child.is_ready or message.pid == child.process.pid
        elif isinstance(message, Heartbeat):
            child.device_memory = message.device_memory
        else:
            child.last_words = child.last_words or message.error
        child.silence, child.is_asked = 0.0, False

    def ask_where(self, name: str) -> None:
        """Let a child that is silent say where it hangs, on standard error."""
        self.children[name].is_asked = True
        ask_where(self.children[name].process)

    def dead(self) -> str | None:
        """A sentence about the first child that ended, or None."""
        for child in self.children.values():
            how = child.how_it_ended()
            if how is not None:
                return f"{how}; the server cannot go on"
        return None

    def start_error(self) -> Exception | None:
        """Why the start fails, if it does."""
        dead = self.dead()
        if dead is None:
            return None
        self._collect_last_words()
        is_configuration = any(child.process.poll() == EXIT_CONFIGURATION for child in self.children.values())
        sentence = next((child.last_words for child in self.children.values() if child.last_words), dead)
        return ConfigurationError(sentence) if is_configuration else RuntimeError(sentence)

    def _collect_last_words(self) -> None:
        for message in self.transport.receive(0.5):
            self.note(message)

    def stop(self, timeout: float) -> None:
        """Ask the engine to stop, which stops its followers; wait for that up to `timeout` seconds, then end whatever is left."""
        deadline = time.monotonic() + timeout
        running = [child for child in self.children.values() if child.process.poll() is None]
        engine = self.children["engine"]
        if engine in running and engine.is_ready:  # one that is starting would not listen
            self.transport.send(Control(id="stop", action="shutdown"))
            for child in running:
                if child.is_rank:
                    _wait(child, max(0.1, deadline - time.monotonic()))
        self.kill()  # text processes hold nothing that matters

    def kill(self) -> None:
        """End whatever is left, now, and remove the sockets."""
        self.end(self.names)
        deadline = time.monotonic() + LAST_WORDS
        for relay in self._relays.values():
            relay.join(max(0.0, deadline - time.monotonic()))
        for sender in self.tokenizers:
            sender.close()
        self.transport.close()
        self._sockets.remove()


def _wait(child: Child, timeout: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout)
