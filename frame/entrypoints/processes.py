"""`Deployment`: the child processes of one server or engine: start, liveness, exit codes, stop. No child outlives its parent.

A child gets the resolved configuration on standard input, which then stays open: its end tells the child that the parent is gone.
Knows no request.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from frame.core.errors import ConfigurationError
from frame.core.messages import Control, Fatal, Forget, Message, Watch
from frame.core.resolved import Resolved
from frame.core.transport import SocketDirectory, ZmqSender, ZmqTransport

EXIT_CONFIGURATION = 78  # sysexits' EX_CONFIG
TERM_WAIT = 3.0  # seconds between SIGTERM and SIGKILL


def _death_signal() -> list[str]:
    # The kernel's signal comes when the starting thread ends, which only for the main thread means the process.
    return ["--death-signal"] if threading.current_thread() is threading.main_thread() else []


@dataclass(frozen=True, slots=True)
class Layout:
    """Which processes there are beside this one."""

    tp: int
    detokenizer: bool
    tokenizers: int
    module: str = "frame.entrypoints.worker"  # what is run; tests put engines with fake models here


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]


class Deployment:
    """Children in the order of their start, and the transport to them. `restart` of a single child is not offered yet: a request's
    state lives in the engine, so a death ends the server."""

    def __init__(self, resolved: Resolved, layout: Layout) -> None:
        self.layout = layout
        self._sockets = SocketDirectory()
        self._config = resolved.model_dump_json().encode() + b"\n"
        self._fatal: Fatal | None = None
        self._children: list[Child] = []
        address = self._sockets.address
        routes: dict[type[Message], str] = {}
        if layout.detokenizer:
            routes = {Watch: address("detokenizer"), Forget: address("detokenizer")}
        self.transport = ZmqTransport(address("client"), address("engine"), routes)
        self.tokenizers = [ZmqSender(address(f"tokenizer-{i}")) for i in range(layout.tokenizers)]
        try:
            self._start(resolved)
        except BaseException:
            self.kill()
            raise

    def _start(self, resolved: Resolved) -> None:
        threads = {"OMP_NUM_THREADS": str(resolved.threads)} if resolved.threads else {}
        engine = ["--detokenizer"] if self.layout.detokenizer else []
        self._spawn("engine", "scheduler", "--tp", str(self.layout.tp), *engine, environment=threads)
        for rank in range(1, self.layout.tp):
            self._spawn(f"rank-{rank}", "follower", "--tp", str(self.layout.tp), "--rank", str(rank), environment=threads)
        if self.layout.detokenizer:
            self._spawn("detokenizer", "detokenizer")
        for i in range(self.layout.tokenizers):
            self._spawn(f"tokenizer-{i}", "tokenizer", "--rank", str(i))

    def _spawn(self, name: str, role: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", self.layout.module, role, "--sockets", str(self._sockets.path), *arguments]
        process = subprocess.Popen(
            [*command, "--parent", str(os.getpid()), *_death_signal()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        self._children.append(Child(name, process))
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it died at once; `dead` will say so
                process.stdin.write(self._config)
                process.stdin.flush()

    @property
    def names(self) -> list[str]:
        """The processes that report ready."""
        return [child.name for child in self._children]

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.process.pid for child in self._children}

    def note(self, message: Message) -> None:
        """Remember why a child says that it ends."""
        if isinstance(message, Fatal):
            self._fatal = self._fatal or message

    def dead(self) -> str | None:
        """A sentence about the first child that ended, or None."""
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"the {child.name} process {how}; the server cannot go on"
        return None

    def start_error(self) -> Exception | None:
        """Why the start fails, if it does."""
        dead = self.dead()
        if dead is None:
            return None
        self._collect_last_words()
        is_configuration = any(child.process.poll() == EXIT_CONFIGURATION for child in self._children)
        sentence = self._fatal.error if self._fatal is not None else dead
        return ConfigurationError(sentence) if is_configuration else RuntimeError(sentence)

    def _collect_last_words(self) -> None:
        for message in self.transport.receive(0.5):
            self.note(message)

    def stop(self, timeout: float) -> None:
        """Ask the engine to stop, which stops its followers; end the rest; wait up to `timeout` seconds, then kill."""
        if self._children and self._children[0].process.poll() is None:
            self.transport.send(Control(id="stop", action="shutdown"))
        deadline = time.monotonic() + timeout
        ranks = [child for child in self._children if child.name == "engine" or child.name.startswith("rank-")]
        for child in ranks:
            _wait(child, max(0.1, deadline - time.monotonic()))
        for child in self._children:
            if child.process.poll() is None:
                child.process.terminate()
        for child in self._children:
            _wait(child, TERM_WAIT)
        self.kill()

    def kill(self) -> None:
        """End whatever is left, now, and remove the sockets."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()
        for sender in self.tokenizers:
            sender.close()
        self.transport.close()
        self._sockets.remove()


def _wait(child: Child, timeout: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout)
