"""The socket before the model is there: health, everything else, odd clients, and the hand-over to the real server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from frame.entrypoints.http.starting import StartingServer


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_answers_while_the_model_loads() -> None:
    with listening() as (listener, url), StartingServer(listener), httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/live?x=1").json() == {}
        for path in ("/health", "/health/ready", "/v1/models", "/health/live2"):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert "starting" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "x" * 500_000}).status_code == 503


def test_odd_clients_do_not_stop_it() -> None:
    with listening() as (listener, url), StartingServer(listener):
        address = listener.getsockname()
        for words in (b"", b"\r\n\r\n", b"GET", b"\x00\xff\r\n\r\n", b"x" * 40_000):
            with socket.create_connection(address) as odd:
                odd.sendall(words)
                odd.shutdown(socket.SHUT_WR)
                while odd.recv(4096):
                    pass
        assert httpx.get(url + "/health/live", trust_env=False).status_code == 200


def test_slow_clients_do_not_hold_up_the_start() -> None:
    stop = threading.Event()

    def drip(slow: socket.socket) -> None:
        while not stop.wait(0.02):
            try:
                slow.send(b"x")
            except OSError:
                return

    with (
        listening() as (listener, url),
        StartingServer(listener),
        socket.create_connection(listener.getsockname()) as head,
        socket.create_connection(listener.getsockname()) as body,
    ):
        body.sendall(b"POST / HTTP/1.1\r\ncontent-length: 999999\r\n\r\n")
        threads = [threading.Thread(target=drip, args=(slow,)) for slow in (head, body)]
        for thread in threads:
            thread.start()
        assert httpx.get(url + "/health/live", trust_env=False, timeout=60).status_code == 200
        stop.set()
        for thread in threads:
            thread.join()


def test_what_comes_later_is_the_real_servers() -> None:
    with listening() as (listener, _):
        with StartingServer(listener):
            pass
        with socket.create_connection(listener.getsockname()) as late:
            late.sendall(b"hello")
            listener.setblocking(True)
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(5) == b"hello"
