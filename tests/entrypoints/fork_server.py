"""Starts servers from a process that has imported what they import: a start then costs 0.4 s of CPU
time instead of 3 s, most of it imports of torch and of the HTTP application.

A server that is started so is a process of its own, with its own sockets, files, signals and
children, and runs the same module (`python -m MODULE`); its first engine is forked from it in turn,
and what is started later (a restart, another rank, a text process) runs the ordinary command. The
process that forks has one thread, no GPU and no state but its imports. Used by
`tests.entrypoints.serving`; tests of starts themselves run the ordinary command.

`python -m tests.entrypoints.fork_server SOCKET PADDING`: an order is one message, with the file
descriptors of standard error and of a pipe on which the exit code is sent. PADDING is overwritten
by the command line that `ps` shows.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

IMPORTED = (
    "frame.entrypoints.cli.main",
    "frame.entrypoints.cli.serve",
    "frame.entrypoints.http.start",
    "frame.entrypoints.http.server",
    "frame.entrypoints.http.extensions",
    "frame.entrypoints.processes.build_engine",
    "tests.entrypoints.fake_engine",
)
OWN = ("FRAME_", "FAULT_FILE", "PYTEST_CURRENT_TEST")  # variables that no import reads
PADDING = 8192  # bytes of a command line
MAX_ORDER = 1 << 17  # bytes
MAX_SERVERS = 4  # of different environments; each has 0.3 GB of imports


class ForkedProcess:
    """What the tests use of a `subprocess.Popen`."""

    def __init__(self, pid: int, code: IO[bytes], stderr: IO[str]) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None
        self._code, self._lock = code, threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        watched = select.poll()  # unlike select, of any number of open files
        watched.register(self._code, select.POLLIN)
        if not watched.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(self._code.read() or -signal.SIGKILL)  # nothing: the process that forked it was killed
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Forks processes until this one ends. `environment`: that of its imports."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), "x" * PADDING]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._lock = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Start `python -m MODULE ARGUMENTS`."""
        stderr, their_stderr = os.pipe()
        code, their_code = os.pipe()
        order = {"command": list(command), "environment": dict(environment), "folder": str(Path.cwd())}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], [their_stderr, their_code])
            pid = int(self._socket.recv(100) or -1)
        assert pid > 0, "the fork server has ended; standard error says why"
        for each in (their_stderr, their_code):
            os.close(each)
        return ForkedProcess(pid, os.fdopen(code, "rb"), os.fdopen(stderr, encoding="utf-8"))


def make_environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


_seen: dict[frozenset[tuple[str, str]], ForkServer | None] = {}  # by the variables that imports may read
_starting = threading.Lock()


def start_forked(command: Sequence[str], extra: Mapping[str, str]) -> ForkedProcess | None:
    """A process that runs `command`, with `extra` variables; None for the first one with such
    variables, and where processes cannot be forked so, as with other folders of modules."""
    if not sys.platform.startswith("linux") or list(command[:2]) != [sys.executable, "-m"] or sum(map(len, command)) > PADDING // 2:
        return None
    if "PYTHONPATH" in extra:  # its modules may change what is imported
        return None
    environment = make_environment(extra)
    read = {name: value for name, value in environment.items() if not name.startswith(OWN)}
    key = frozenset(read.items())
    with _starting:
        if key not in _seen:
            _seen[key] = None
            return None
        server = _seen[key]
        if server is None:
            if sum(each is not None for each in _seen.values()) == MAX_SERVERS:
                return None
            server = _seen[key] = ForkServer(read)
    return server.start(command, environment)


# the process that forks ---------------------------------------------------------------------------


def serve_orders(link: socket.socket) -> None:
    """Fork for each order, and send the exit codes, until the other end is closed."""
    codes: dict[int, tuple[int, int]] = {}  # by the descriptor of a process: its id, and that of its exit code
    watched = select.poll()  # the link has the number that it has in the tests' process, maybe a large one
    watched.register(link, select.POLLIN)
    while True:
        for ready, _ in watched.poll():
            if ready != link.fileno():
                watched.unregister(ready)
                pid, code = codes.pop(ready)
                os.write(code, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(code)
                os.close(ready)
                continue
            data, descriptors, _, _ = socket.recv_fds(link, MAX_ORDER, 2)
            if not data:
                for pid, _ in codes.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return
            stderr, code = descriptors
            assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"  # noqa: PTH208
            pid = os.fork()
            if not pid:
                run_order(json.loads(data), stderr)
            os.close(stderr)
            process = os.pidfd_open(pid)
            watched.register(process, select.POLLIN)
            codes[process] = (pid, code)
            link.send(str(pid).encode())


def run_order(order: dict[str, Any], stderr: int) -> None:
    """Be the process that an order asks for. Does not return."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    from frame.entrypoints.processes import early_process

    early_process.start_process = fork_engine
    become(order["command"], os.open(os.devnull, os.O_RDONLY), stderr)


def fork_engine(command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> subprocess.Popen[bytes]:
    """As `start_process`, for a server's first engine: the server has one thread yet."""
    from frame.host import child_process
    from frame.host.interpreter import child_environment

    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return child_process.start_process(command, environment, pipes_errors=pipes_errors)
    theirs, stdin = os.pipe()
    stderr, their_stderr = os.pipe() if pipes_errors else (-1, 2)
    command = [*command, "--parent", str(os.getpid()), "--death-signal"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, child_process.PARENTS_SIGNALS)
    pid = os.fork()
    if not pid:
        os.environ.update(child_environment(environment))
        become(command, theirs, their_stderr)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(theirs)
    if pipes_errors:
        os.close(their_stderr)
    return adopt(command, pid, stdin, stderr)


def adopt(command: Sequence[str], pid: int, stdin: int, stderr: int) -> subprocess.Popen[bytes]:
    """A `Popen` of a child that was forked."""
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE)  # every attribute of one
    child.communicate()
    child.args, child.pid, child.returncode = list(command), pid, None
    child.stdin, child.stderr = os.fdopen(stdin, "wb", 0), os.fdopen(stderr, "rb") if stderr >= 0 else None
    return child


def become(command: Sequence[str], stdin: int, stderr: int) -> None:
    """Run `python [-P] -m MODULE ARGUMENTS`, with no file open but standard ones, and end."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number, each in enumerate((stdin, null, stderr)):
        os.dup2(each, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    show_command(command)
    place = list(command).index("-m")
    module = command[place + 1]
    sys.argv[:] = [sys.argv[0], *command[place + 2 :]]
    sys.modules.pop(module, None)  # it runs as the main module
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def show_command(command: Sequence[str]) -> None:
    """Write the command line over this process's own, which is longer."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and the 49th
    data = b"".join(each.encode() + b"\0" for each in command)
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        for name in IMPORTED:
            importlib.import_module(name)
        for each in pkgutil.walk_packages(importlib.import_module("frame.entrypoints.http").__path__, "frame.entrypoints.http."):
            with contextlib.suppress(ImportError):  # it needs an optional package
                importlib.import_module(each.name)
        gc.freeze()
        serve_orders(orders)
