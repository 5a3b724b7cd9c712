"""Starts servers and programs from a process that has imported what they import: a start then costs
0.4 s of CPU time instead of 3 s, most of it imports of torch and of the HTTP application.

A server that is started so is a process of its own, with its own sockets, files, signals and
children, and runs the same module (`python -m MODULE`); its first engine is forked from it in turn.
What is started later (a restart, another rank, a text process) runs the ordinary command, or with
`forks_children` is forked too: from a child that the server has left with one thread, and given to
the server as its own child. `run_forked` is `subprocess.run` of a program that is not itself under
test. The process that forks has one thread, no GPU and no state but its imports. Used by
`tests.entrypoints.serving` and by tests that run programs; tests of starts themselves run the
ordinary command.

`python -m tests.entrypoints.fork_server SOCKET WITH_FRAME PADDING`: an order is one message, with
the file descriptors of the standard streams and of a pipe on which the exit code is sent. PADDING
is overwritten by the command line that `ps` shows.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.metadata import keep_metadata

IMPORTED = (
    "frame.entrypoints.cli.main",
    "frame.entrypoints.cli.serve",
    "frame.entrypoints.http.start",
    "frame.entrypoints.http.server",
    "frame.entrypoints.http.extensions",
    "frame.entrypoints.processes.build_engine",
    "tests.entrypoints.fake_engine",
)
# What frame imports, for programs that users write: they import modules of frame that no other has.
THIRD_PARTY = ("fastapi", "httpx", "numpy", "prometheus_client", "pydantic", "pytest", "torch", "triton", "uvicorn", "yaml", "zmq")
USERS_OF_START_PROCESS = ("frame.entrypoints.processes.deployment", "frame.plugins.launchers.local", "frame.plugins.launchers.rendezvous")
OWN = ("FRAME_", "FAULT_FILE", "PYTEST_CURRENT_TEST", "LITELLM_", "LANGSMITH_")  # variables that no import reads
PADDING = 8192  # bytes of a command line
MAX_ORDER = 1 << 17  # bytes
MAX_SERVERS = 4  # of different environments; each has 0.3 GB of imports
CHILD_ROLE = "forks-children"  # shown by `ps` in the place of a role
PR_SET_CHILD_SUBREAPER = 36

StartProcess = Callable[..., subprocess.Popen[bytes]]


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


class CannotForkError(Exception):
    """The fork server has ended, or has threads."""


class ForkServer:
    """Forks processes until this one ends. `environment`: that of its imports. with_frame: it
    imports frame, too. `can_fork`: False once an order has failed; what it has forked runs on."""

    def __init__(self, environment: Mapping[str, str], python: str = sys.executable, *, with_frame: bool = True) -> None:
        self.can_fork = True
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, "-P", "-m", __name__, str(theirs.fileno()), str(int(with_frame)), "x" * PADDING]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._lock = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, forks_children: bool = False) -> ForkedProcess:
        """Start `python -m MODULE ARGUMENTS`. Raises CannotForkError."""
        stderr, their_stderr = os.pipe()
        order = {"command": list(command), "environment": dict(environment), "folder": str(Path.cwd()), "forks_children": forks_children}
        try:
            with Path(os.devnull).open("r+b", buffering=0) as null:
                pid, code = self._send(order, (null.fileno(), null.fileno(), their_stderr))
        except CannotForkError:
            os.close(stderr)
            raise
        finally:
            os.close(their_stderr)
        return ForkedProcess(pid, code, os.fdopen(stderr, encoding="utf-8"))

    def run(self, order: Mapping[str, Any], timeout: float) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` with captured text. Raises CannotForkError."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, Path(os.devnull).open("rb") as null:
            pid, code = self._send(order, (null.fileno(), out.fileno(), errors.fileno()))
            process = ForkedProcess(pid, code, os.fdopen(os.dup(errors.fileno()), encoding="utf-8"))
            try:
                returncode = process.wait(timeout)
            finally:
                process.kill()
                process.stderr.close()
                code.close()
            texts = []
            for file in (out, errors):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(order["command"], returncode, *texts)

    def _send(self, order: Mapping[str, Any], streams: tuple[int, int, int]) -> tuple[int, IO[bytes]]:
        """-> the process id, and the pipe of the exit code."""
        code, their_code = os.pipe()
        pid = 0
        with self._lock, contextlib.suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(order).encode()], [*streams, their_code])
            pid = int(self._socket.recv(100) or 0)
        os.close(their_code)
        if not pid:
            os.close(code)
            self.can_fork = False
            raise CannotForkError
        return pid, os.fdopen(code, "rb")


def make_environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


_seen: dict[frozenset[tuple[str, str]], ForkServer | None] = {}  # by Python and the variables that imports may read
_starting = threading.Lock()


def start_forked(command: Sequence[str], extra: Mapping[str, str], *, forks_children: bool = False) -> ForkedProcess | None:
    """A process that runs `command`, with `extra` variables; None for the first one with such
    variables, and where processes cannot be forked so, as with other folders of modules. Then the
    caller runs the ordinary command.
    `forks_children`: what it starts once it has threads is forked too."""
    if list(command[:2]) != [sys.executable, "-m"] or sum(map(len, command)) > PADDING // 2:
        return None
    if "PYTHONPATH" in extra:  # its modules may change what is imported
        return None
    environment = make_environment(extra)
    server = _find_server(sys.executable, environment)
    if server is not None:
        with contextlib.suppress(CannotForkError):
            return server.start(command, environment, forks_children=forks_children)
    return None


def run_forked(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    imports: Sequence[str] = (),
    paths: Sequence[str] = (),
    with_frame: bool = True,
    timeout: float = 500.0,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a Python program (`-m MODULE`, `-c CODE` or a file) that is not itself
    under test, with captured text. The first one of a Python and an environment is not forked.
    `environment`: None: this process's; `imports`: modules to import once for all; `paths`: folders
    to add to PYTHONPATH, whose modules change nothing that is imported here; with_frame: False for
    a program that users write, which must import itself what it needs of frame."""
    environment = make_environment({}) if environment is None else environment
    server = _find_server(command[0], environment, with_frame=with_frame)
    if paths:
        environment = {**environment, "PYTHONPATH": os.pathsep.join((*paths, environment["PYTHONPATH"]))}
    if server is not None:
        order = {"command": list(command), "environment": dict(environment), "folder": str(cwd or Path.cwd())}
        with contextlib.suppress(CannotForkError):
            return server.run({**order, "imports": list(imports), "paths": list(paths)}, timeout)
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def _find_server(python: str, environment: Mapping[str, str], *, with_frame: bool = True) -> ForkServer | None:
    if not sys.platform.startswith("linux"):
        return None
    read = {name: value for name, value in environment.items() if not name.startswith(OWN)}
    key = frozenset({*read.items(), ("", f"{python} {with_frame}")})
    with _starting:
        if key not in _seen:
            _seen[key] = None
            return None
        server = _seen[key]
        if server is None:
            if sum(each is not None for each in _seen.values()) == MAX_SERVERS:
                return None
            server = _seen[key] = ForkServer(read, python, with_frame=with_frame)
    return server if server.can_fork else None


# the process that forks ---------------------------------------------------------------------------


def serve_orders(link: socket.socket) -> None:
    """Fork for each order, and send the exit codes, until the other end is closed. An order is
    refused, by the process id 0, once the imports of one have started a thread."""
    codes: dict[int, tuple[int, int]] = {}  # by the descriptor of a process: its id, and that of its exit code
    watched = select.poll()  # the link has the number that it has in the tests' process, maybe a large one
    watched.register(link, select.POLLIN)
    while True:
        for ready, _ in watched.poll():
            if ready != link.fileno():
                watched.unregister(ready)
                pid, code = codes.pop(ready)
                with contextlib.suppress(BrokenPipeError):  # it was killed for taking too long
                    os.write(code, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(code)
                os.close(ready)
                continue
            data, descriptors, _, _ = socket.recv_fds(link, MAX_ORDER, 4)
            if not data:
                for pid, _ in codes.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return
            *streams, code = descriptors
            order = json.loads(data)
            import_modules(order.get("imports", ()))
            can_fork = len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
            pid = os.fork() if can_fork else 0
            if can_fork and not pid:
                run_order(order, streams)
            for each in streams:
                os.close(each)
            if can_fork:
                process = os.pidfd_open(pid)
                watched.register(process, select.POLLIN)
                codes[process] = (pid, code)
            else:
                os.close(code)
            link.send(str(pid).encode())


def import_modules(names: Iterable[str]) -> None:
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(Exception):  # the program that imports it says why
            importlib.import_module(name)
    if missing:
        gc.freeze()


def run_order(order: dict[str, Any], streams: Sequence[int]) -> None:
    """Be the process that an order asks for. Does not return."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:0] = order.get("paths", ())
    if "frame" not in sys.modules:
        become(order["command"], streams)
    from frame.entrypoints.processes import early_process
    from frame.host import child_process

    early_process.start_process = fork_engine
    kept = ()
    if order.get("forks_children"):
        link, forker = start_child_server()
        child_process.start_process = functools.partial(fork_child, link, forker, child_process.start_process)
        for name in USERS_OF_START_PROCESS:
            if name in sys.modules:
                sys.modules[name].start_process = child_process.start_process  # type: ignore[attr-defined]
        kept = (link.fileno(),)
    become(order["command"], streams, kept)


def fork_engine(command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> subprocess.Popen[bytes]:
    """As `start_process`, for a server's first engine: the server has one thread yet."""
    from frame.host import child_process
    from frame.host.interpreter import child_environment

    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return child_process.start_process(command, environment, pipes_errors=pipes_errors)
    ends = Pipes(pipes_errors)
    command = [*command, "--parent", str(os.getpid()), "--death-signal"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, child_process.PARENTS_SIGNALS)
    pid = os.fork()
    if not pid:
        os.environ.update(child_environment(environment))
        become(command, ends.theirs)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ends.adopt(command, pid)


class Pipes:
    """The standard streams of a child that is forked. theirs: the child's ends."""

    def __init__(self, pipes_errors: bool) -> None:
        stdin, self._stdin = os.pipe()
        self._stderr, stderr = os.pipe() if pipes_errors else (-1, os.dup(2))
        self.theirs = (stdin, os.open(os.devnull, os.O_WRONLY), stderr)

    def close(self) -> None:
        for each in (*self.theirs, self._stdin, self._stderr):
            with contextlib.suppress(OSError):  # -1: none
                os.close(each)

    def adopt(self, command: Sequence[str], pid: int) -> subprocess.Popen[bytes]:
        """A `Popen` of a child that was forked."""
        for each in self.theirs:
            os.close(each)
        child = subprocess.Popen(["true"], stdin=subprocess.PIPE)  # every attribute of one
        child.communicate()
        child.args, child.pid, child.returncode = list(command), pid, None
        child.stdin, child.stderr = os.fdopen(self._stdin, "wb", 0), os.fdopen(self._stderr, "rb") if self._stderr >= 0 else None
        return child


def start_child_server() -> tuple[socket.socket, int]:
    """Leave a process that forks children of this one, which will have threads. It ends with this
    one. -> where it takes orders, and its process id."""
    from frame.host.child_process import PARENTS_SIGNALS

    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if forker := os.fork():
        theirs.close()
        return link, forker
    signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    take_files([os.open(os.devnull, os.O_RDWR)] * 3, [theirs.fileno()])
    show_command([sys.executable, "-P", "-m", "tests.entrypoints.fork_server", CHILD_ROLE])
    while True:
        data, streams, _, _ = socket.recv_fds(theirs, MAX_ORDER, 3)
        if not data:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                run_child_order(json.loads(data), streams)
            os.write(tell, str(pid).encode())
            os._exit(0)  # and so the process that asked, for now the reaper of orphans, becomes the parent
        os.waitpid(between, 0)
        theirs.send(os.read(told, 100))
        for each in (told, tell, *streams):
            os.close(each)


def run_child_order(order: dict[str, Any], streams: Sequence[int]) -> None:
    """Be the child that an order asks for, once its parent is what asked. Does not return."""
    deadline = time.monotonic() + 60
    while os.getppid() != order["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    os.environ.clear()
    os.environ.update(order["environment"])
    become(order["command"], streams)


def fork_child(
    link: socket.socket, forker: int, start: StartProcess, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool
) -> subprocess.Popen[bytes]:
    """As `start_process`, here `start`, for a server with threads. Commands that imports may read
    run as ordinary ones, and all do once `forker`, the process at `link`, has ended."""
    from frame.entrypoints.processes.early_process import SETTABLE
    from frame.host.child_process import _death_signal
    from frame.host.interpreter import child_environment, python_command

    if list(command[:3]) != python_command("-m") or not environment.keys() <= SETTABLE:
        return start(command, environment, pipes_errors=pipes_errors)
    ends = Pipes(pipes_errors)
    full = [*command, "--parent", str(os.getpid()), *_death_signal()]
    order = {"command": full, "environment": child_environment(environment), "parent": os.getpid()}
    library, pid = ctypes.CDLL(None), 0
    with _starting, contextlib.suppress(OSError):
        library.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(link, [json.dumps(order).encode()], ends.theirs)
            pid = int(link.recv(100) or 0)
        finally:
            library.prctl(PR_SET_CHILD_SUBREAPER, 0)
    if not pid:
        with contextlib.suppress(ChildProcessError):  # it was waited for
            os.waitpid(forker, 0)
        ends.close()
        return start(command, environment, pipes_errors=pipes_errors)
    return ends.adopt(full, pid)


def take_files(streams: Sequence[int], kept: Sequence[int] = ()) -> None:
    """Have no file open but standard ones and `kept`."""
    for number, each in enumerate(streams):
        os.dup2(each, number)
    for low, high in itertools.pairwise((2, *sorted(kept), os.sysconf("SC_OPEN_MAX"))):
        os.closerange(low + 1, high)


def become(command: Sequence[str], streams: Sequence[int], kept: Sequence[int] = ()) -> None:
    """Run `python [-P] (-m MODULE | -c CODE | FILE) ARGUMENTS`, with no file open but these, and
    end."""
    take_files(streams, kept)
    show_command(command)
    first, *arguments = (each for place, each in enumerate(command) if place and (place, each) != (1, "-P"))
    code: Any = 0
    try:
        run_program(first, arguments)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(code + "\n")
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


def run_program(first: str, arguments: Sequence[str]) -> None:
    """As the interpreter after its options."""
    if first == "-m":
        module, *arguments = arguments
        sys.argv[:] = [sys.argv[0], *arguments]
        sys.modules.pop(module, None)  # it runs as the main module
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first == "-c":
        text, *arguments = arguments
        sys.argv[:] = ["-c", *arguments]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = [first, *arguments]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def show_command(command: Sequence[str]) -> None:
    """Write the command line over this process's own, which is longer."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and the 49th
    data = b"".join(each.encode() + b"\0" for each in command)
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        if int(sys.argv[2]):
            keep_metadata()
            for name in IMPORTED:
                importlib.import_module(name)
            http = importlib.import_module("frame.entrypoints.http")
            import_modules(each.name for each in pkgutil.walk_packages(http.__path__, "frame.entrypoints.http."))
        else:
            import_modules(THIRD_PARTY)
        serve_orders(orders)
