"""The socket before the model is there: health, everything else, odd clients, and the hand-over to
the real server."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from frame.config.server_sections import ServerSection
from frame.entrypoints.http.protocol import starting
from frame.entrypoints.http.protocol.starting import PATIENCE, StartingServer
from frame.entrypoints.tls import load_certificate
from tests.entrypoints.test_tls import CHAIN, KEY

PAIR = {"ssl_certfile": str(CHAIN), "ssl_keyfile": str(KEY)}


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_answers_while_the_model_loads() -> None:
    with listening() as (listener, url), StartingServer(listener, 64), httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/live?x=1").json() == client.get("/livez").json() == {}
        for path in ("/health", "/health/ready", "/v1/models", "/health/live2"):
            reply = client.get(path)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
            assert "starting" in reply.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "x" * 500_000}).status_code == 503


def test_odd_clients_do_not_stop_it() -> None:
    with listening() as (listener, url), StartingServer(listener, 64):
        address = listener.getsockname()
        for words in (b"", b"\r\n\r\n", b"GET", b"\x00\xff\r\n\r\n", b"x" * 40_000):
            with socket.create_connection(address) as odd:
                odd.sendall(words)
                odd.shutdown(socket.SHUT_WR)
                while odd.recv(4096):
                    pass
        assert httpx.get(url + "/health/live", trust_env=False).status_code == 200


def test_half_sent_heads_and_bodies_delay_no_other_client() -> None:
    with listening() as (listener, url), StartingServer(listener, 64), ExitStack() as clients:
        for words in (b"GET /health/live HTTP/1.1\r\nhost:", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n", b"") * 10:
            clients.enter_context(socket.create_connection(listener.getsockname())).sendall(words)
        started = time.monotonic()
        for _ in range(10):
            assert httpx.get(url + "/health/live", trust_env=False, timeout=60).status_code == 200
        assert time.monotonic() - started < PATIENCE  # so none of them was waited for


def test_a_client_that_never_ends_its_head_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "PATIENCE", 0.1)
    with listening() as (listener, _), StartingServer(listener, 64):
        post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"
        for words, status in ((b"GET / HT", b"408"), (post, b"408"), (b"GET\r\n\r\n", b"400")):
            with socket.create_connection(listener.getsockname()) as slow:
                slow.settimeout(30)
                slow.sendall(words)
                assert slow.recv(65536).split()[1] == status


def test_speaks_tls_where_the_server_does() -> None:
    trusting = ssl.create_default_context(cafile=str(CHAIN))
    with listening() as (listener, url), StartingServer(listener, 64, load_certificate(ServerSection(**PAIR))), ExitStack() as clients:
        for words in (b"", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n") * 5:  # no handshake, half of one, none
            clients.enter_context(socket.create_connection(listener.getsockname())).sendall(words)
        secure = url.replace("http:", "https:")
        assert httpx.get(secure + "/health/live", trust_env=False, verify=trusting, timeout=60).status_code == 200
        assert httpx.get(secure + "/v1/models", trust_env=False, verify=trusting, timeout=60).status_code == 503
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url + "/health/live", trust_env=False)


def test_connections_are_counted() -> None:
    with listening() as (listener, url), StartingServer(listener, 3), ExitStack() as clients:
        for _ in range(3):
            clients.enter_context(socket.create_connection(listener.getsockname())).sendall(b"G")
        refused = httpx.get(url + "/health/live", trust_env=False, timeout=60)
        assert (refused.status_code, "3 connections are open" in refused.text) == (503, True)


def test_what_comes_later_is_the_real_servers() -> None:
    with listening() as (listener, _):
        with StartingServer(listener, 64):
            pass
        with socket.create_connection(listener.getsockname()) as late:
            late.sendall(b"hello")
            listener.setblocking(True)
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(5) == b"hello"
