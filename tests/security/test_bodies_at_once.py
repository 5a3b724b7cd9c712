"""Large bodies that one client completes at the same moment: others are served between them."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.entrypoints.serving import RunningServer

COUNT = 24
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS * 2000},
    "/v1/responses": {"input": TURNS * 2000},
    "/v1/messages": {"messages": TURNS * 2000},
    "/v1/completions": {"prompt": [5] * 250_000},
    "/tokenize": {"messages": [*TURNS, {"role": "assistant", "content": None, "tool_calls": [CALL] * 1700}]},
}


class Neighbour:
    """Another client, which asks for `/health` all the time."""

    def __init__(self, url: str) -> None:
        self._url, self._ends, self.longest = url, threading.Event(), 0.0  # seconds
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            began = time.perf_counter()
            with urllib.request.urlopen(f"{self._url}/health", timeout=60) as reply:
                reply.read()
            self.longest = max(self.longest, time.perf_counter() - began)
            time.sleep(0.002)

    def stop(self) -> float:
        self._ends.set()
        self._thread.join()
        return self.longest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RunningServer(Path("frame-tiny"), "--max-model-len", "512") as running:
        yield running


def complete_at_once(url: str, path: str, body: dict[str, Any]) -> float:
    """Send all of the bodies but the last byte of each, then these. -> seconds to the last reply"""
    parts = urlsplit(url)
    data = json.dumps({"model": "frame-tiny", "max_tokens": 1, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    clients = [socket.create_connection((parts.hostname, parts.port), 60) for _ in range(COUNT)]
    for client in clients:
        client.sendall(head.encode() + data[:-1])
    time.sleep(0.5)
    began = time.perf_counter()
    for client in clients:
        client.sendall(data[-1:])
    for client in clients:
        assert client.recv(12).startswith(b"HTTP/1.1 400")  # too long for the context
        client.close()
    return time.perf_counter() - began


@pytest.mark.parametrize("path", BODIES)
def test_others_are_served_between_them(server: RunningServer, path: str) -> None:
    """They took all of the time between one reply to another client and the next."""
    shares = []
    for _ in range(3):
        neighbour = Neighbour(server.url)
        took = complete_at_once(server.url, path, BODIES[path])
        shares.append(neighbour.stop() / took)
    assert min(shares) < 0.3, shares
