"""A full disk, and clients that do not read: others notice nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.entrypoints.chaos.storm import Storm
from tests.entrypoints.chaos.test_requests import body_of, connect
from tests.entrypoints.serving import FAKE_SERVE, RunningServer, wait_until


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_a_full_disk(checkpoint: Path) -> None:
    """Neither the log nor the in-flight file can be written; requests are served, and continue
    after a crash."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    serve = [*FAKE_SERVE, "--model", str(checkpoint), "--port", str(port), "--access-log"]
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FRAME_FAKE_STEP": "0.002"}
        process = subprocess.Popen(serve, stderr=full, env=environment)
    try:
        wait_until(lambda: is_ready(url) or process.poll() is not None, 60)
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))  # no file may get a first byte; inherited by new children
        expected = httpx.post(url + "/v1/completions", json=body_of(5, 6, max_tokens=400), timeout=60).json()["choices"][0]["text"]
        text = ""
        with httpx.stream("POST", url + "/v1/completions", json=body_of(5, 6, max_tokens=400, stream=True), timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if not text:
                        psutil.Process(process.pid).children()[0].kill()
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_clients_that_do_not_read(fake_server: RunningServer) -> None:
    """They keep neither the engine nor other clients waiting, and find everything when they do
    read."""
    body: dict[str, Any] = body_of(5, 6, 7, max_tokens=450, stream=True, logprobs=5)
    slow = [connect(fake_server, body) for _ in range(16)]
    reply = fake_server.post("/v1/completions", {**body, "stream": False})
    expected = reply.json()["choices"][0]["text"]
    wait_until(lambda: fake_server.get("/server_info")["running"] == 0)
    for connection in slow:
        with connection:
            connection.shutdown(socket.SHUT_WR)
            events = [json.loads(line[6:]) for line in read_all(connection).split(b"\n") if line.startswith(b"data: {")]
            assert "".join(event["choices"][0]["text"] for event in events) == expected


@pytest.mark.slow
def test_a_client_that_does_not_read_is_given_up(checkpoint: Path) -> None:
    """Its answer grows no further than allowed, its request ends in the engine, and it is told why;
    64 others notice nothing."""
    flags = ("--max-model-len", "1024", "--max-total-tokens", "65536", "--max-running-requests", "128", "--max-unread-tokens", "1000")
    with RunningServer(checkpoint, *flags, env={"FRAME_FAKE_STEP": "0.008"}) as server:
        storm = Storm(64, 60)
        calm = storm(server)
        served = server.metric("frame_generation_tokens_total")
        with connect(server, body_of(5, 6, 7, max_tokens=1000, stream=True, logprobs=20, n=32), room=4096) as slow:  # 10 MB
            assert storm(server) == calm
            wait_until(lambda: server.get("/server_info")["outstanding"] == 0)
            assert server.metric("frame_generation_tokens_total") - 2 * served < 32 * 1000  # it was stopped before its end
            slow.shutdown(socket.SHUT_WR)
            data = read_all(slow)
        last = [line for line in data.split(b"\n") if line.startswith(b"data: {")][-1]
        error = json.loads(last[6:])["error"]
        assert (error["code"], error["type"]) == ("answer_not_read", "timeout_error")
        assert "more than 1000 of its tokens wait (server.max_unread_tokens)" in error["message"]
