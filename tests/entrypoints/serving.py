"""A server in a subprocess, as users start it, for tests: waits for the ready line, stops by
signal, knows its children."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.entrypoints.fork_server import CHILD_ROLE, make_environment, start_forked

if TYPE_CHECKING:
    from frame import Engine

READY = re.compile(r"ready on (https?://[^\s,]+)")
START_TIMEOUT = 240.0  # seconds, as all limits here: for a machine that is busy with other work
FAKE_SERVE = (sys.executable, "-m", "tests.entrypoints.fake_engine", "serve")


class RunningServer:
    """`fake`: the engine runs a fake model (`fake_engine.py`), which starts fast and
    needs no weights. `reads_log`: standard error is read to its end; else only until the server is
    ready. `command`: of a server that is no fake; `cwd`: its working folder. `forked`: it may be
    started by the fork server, which has its imports. `forks_children`: so are restarts of its
    engine, its other ranks and its text processes."""

    _forks_children = False

    def __init__(
        self,
        folder: Path,
        *flags: str,
        fake: bool = True,
        env: dict[str, str] | None = None,
        reads_log: bool = True,
        command: Sequence[str] = (sys.executable, "-m", "frame", "serve"),
        cwd: Path | None = None,
        forked: bool = True,
        forks_children: bool = True,
    ) -> None:
        command = [*(FAKE_SERVE if fake else command), "--model", str(folder), "--port", "0", *flags]
        self._forks_children = forks_children
        self._start(command, env, reads_log, cwd, forked and cwd is None)

    def _start(self, command: list[str], env: dict[str, str] | None, reads_log: bool, cwd: Path | None = None, forked: bool = True) -> None:
        forked_process = start_forked(command, env or {}, forks_children=self._forks_children) if forked else None
        self.process = forked_process or subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=make_environment(env or {}), text=True, cwd=cwd
        )
        self.lines: list[str] = []
        self._reads_log = reads_log
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_TIMEOUT) or not self.url:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = READY.search(line)
            if found:
                self.url = found.group(1)
                self._ready.set()
                if not self._reads_log:
                    return
        self._ready.set()
        self.process.stderr.close()

    def children(self) -> dict[str, psutil.Process]:
        """By role."""
        return {child.cmdline()[4]: child for child in list_children(self.process.pid)}

    @property
    def grpc_address(self) -> str:
        """Of a server with --grpc-port."""
        return next(line.split()[-1] for line in self.lines if "gRPC on" in line)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=120).raise_for_status().json()

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        families = text_string_to_metric_families(httpx.get(self.url + "/metrics", timeout=120).text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def ready(self) -> bool:
        return httpx.get(self.url + "/health/ready", timeout=120).status_code == 200

    def kill(self) -> None:
        """SIGKILL of the server and all its processes."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout: float = 120.0) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def list_children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """The children of a server, without the one that forks them."""

    def forks(child: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return CHILD_ROLE in child.cmdline()
        return False

    return [child for child in psutil.Process(pid).children(recursive) if not forks(child)]


@contextlib.contextmanager
def open_engines(folders: Sequence[Path], **keys: Any) -> Iterator[list[Engine]]:
    """An offline engine for each checkpoint."""
    from frame import Engine  # loads torch

    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Engine(str(folder), **keys)) for folder in folders]


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones: a port that was closed may be the next one that the kernel gives."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class RunningRouter(RunningServer):
    """`frame router` in front of the servers at `urls`, with these flags."""

    def __init__(self, *urls: str, flags: Sequence[str] = ()) -> None:
        replicas = [flag for url in urls for flag in ("--replica", url)]
        self._start([sys.executable, "-m", "frame", "router", *replicas, *flags, "--port", "0", "--health-interval", "0.2"], None, True)


def wait_until(condition: Any, timeout: float = 60.0) -> None:
    """Poll a condition of another process, at most half of the time: it has work to do."""
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        if condition():
            return
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(min(0.1, max(0.01, time.monotonic() - began)))
