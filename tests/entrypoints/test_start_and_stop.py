"""Standard streams that are closed, and the exit codes of a server that is stopped or loses a
process while it starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.entrypoints.serving import FAKE_SERVE, wait_until

SERVE = (*FAKE_SERVE, "--max-model-len", "512", "--max-total-tokens", "1024", "--model")


@contextmanager
def starting(checkpoint: Path, *flags: str, shell: str = "", seconds: float = 0.0) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that is being started, and its URL. `shell`: redirections; `seconds` that the
    engine's start takes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*SERVE, str(checkpoint), "--port", str(port), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FRAME_FAKE_START": str(seconds)}
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$@" {shell}', "sh", *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def replies(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("shell", [pytest.param("2>&-", marks=pytest.mark.soak), "<&- >&- 2>&-"])
def test_closed_standard_streams(checkpoint: Path, shell: str) -> None:
    with starting(checkpoint, "--access-log", "--detokenizer-workers", "1", shell=shell) as (process, url):
        wait_until(lambda: replies(url + "/health/ready") or process.poll() is not None, 60)
        assert process.poll() is None
        for child in (psutil.Process(process.pid), *psutil.Process(process.pid).children()):
            links = {number: str(Path(f"/proc/{child.pid}/fd/{number}").readlink()) for number in (0, 1, 2)}
            assert not [link for number, link in links.items() if number and "socket:" in link], links  # nothing else took their numbers
        assert httpx.post(url + "/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_the_log_says_that_the_port_is_open_before_the_model_is_loaded(checkpoint: Path) -> None:
    with starting(checkpoint, seconds=30.0) as (process, url):
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        line = next(line for line in lines if b" is open; " in line or b"ready " in line)
        assert line.decode() == f"frame: {url} is open; requests get 503 until the model is loaded\n"
        assert httpx.get(url + "/health/live", timeout=30).status_code == 200
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}, timeout=30).status_code == 503


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("spawned", signal.SIGINT),
        ("loading", signal.SIGTERM),
        pytest.param("spawned", signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param("loading", signal.SIGINT, marks=pytest.mark.soak),
    ],
)
def test_a_server_that_is_stopped_while_it_starts_ends_with_0(checkpoint: Path, number: signal.Signals, moment: str) -> None:
    with starting(checkpoint, seconds=30.0) as (process, url):
        if moment == "spawned":
            wait_until(lambda: psutil.Process(process.pid).children() or process.poll() is not None, 60)
        else:
            wait_until(lambda: replies(url + "/health/live") or process.poll() is not None, 60)
        children = psutil.Process(process.pid).children()
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()
        assert b"Traceback" not in said
        assert b"Aborted" not in said
        assert not [child for child in children if child.is_running()]


@pytest.mark.slow
def test_a_process_that_dies_during_the_start_ends_it_with_1(checkpoint: Path) -> None:
    with starting(checkpoint, seconds=30.0) as (process, url):
        wait_until(lambda: replies(url + "/health/live"), 60)
        psutil.Process(process.pid).children()[0].kill()
        _, said = process.communicate(timeout=300)
        assert process.returncode == 1, said.decode()
        assert b"frame: the start failed: the engine process was killed by signal 9" in said
        assert b"Traceback" not in said


def test_a_port_that_is_taken_ends_the_start_with_78(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [*SERVE, str(checkpoint), "--port", str(taken.getsockname()[1])]
        ended = subprocess.run([command[0], "-m", "frame", *command[3:]], capture_output=True, timeout=500, check=False)
    assert ended.returncode == 78, ended.stderr.decode()
    assert b"cannot listen on 127.0.0.1" in ended.stderr
