"""A server that is forked looks, fails and ends as one that is started by its command."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.entrypoints.fork_server import ForkedProcess, ForkServer, make_environment, start_forked
from tests.entrypoints.serving import READY

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers are forked on Linux only")


def command_of(checkpoint: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.entrypoints.fake_engine", "serve", "--model", str(checkpoint), "--port", "0", *flags]


def start(command: list[str], **environment: str) -> ForkedProcess:
    """The first start with an environment is none of a fork."""
    process = start_forked(command, environment) or start_forked(command, environment)
    assert process is not None
    return process


@pytest.fixture
def running(checkpoint: Path) -> Iterator[tuple[ForkedProcess, str]]:
    process = start(command_of(checkpoint, "--max-model-len", "64"), FRAME_FAKE_TOKENS="640")
    url = next(found[1] for line in process.stderr if (found := READY.search(line)))
    yield process, url
    process.kill()
    process.wait(30)


def test_it_has_its_command_variables_and_files(running: tuple[ForkedProcess, str], checkpoint: Path) -> None:
    process, url = running
    shown = psutil.Process(process.pid)
    assert list(filter(None, shown.cmdline())) == command_of(checkpoint, "--max-model-len", "64")
    assert httpx.get(url + "/server_info").json()["max_total_tokens"] == 640
    assert not [file for file in shown.open_files() if "pytest" in file.path]
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == process.poll() == 0
    assert "stopping" in process.stderr.read()
    assert not psutil.pid_exists(process.pid)


def test_its_end_by_a_signal_is_seen(running: tuple[ForkedProcess, str]) -> None:
    process, _ = running
    children = psutil.Process(process.pid).children()
    assert children
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    assert not psutil.wait_procs(children, 30)[1]


def test_its_refusal_has_a_code_and_a_sentence(checkpoint: Path) -> None:
    process = start(command_of(checkpoint, "--no-such-flag"))
    assert process.wait(30) != 0
    assert "--no-such-flag" in process.stderr.read()


def test_it_is_forked_where_many_files_are_open(checkpoint: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        server = ForkServer(make_environment({}))
        process = server.start(command_of(checkpoint, "--no-such-flag"), make_environment({}))
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.wait(30) != 0
    assert "--no-such-flag" in process.stderr.read()
    server.close()
