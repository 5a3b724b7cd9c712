"""Connections over TLS: they are counted from the accept on, their handshake has a time, and then
they are as any other."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvloop

from frame.config.server_sections import ServerSection
from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import HttpServer
from frame.entrypoints.tls import load_certificate
from tests.entrypoints.http.protocol.asgi import read_body, reply_with
from tests.entrypoints.test_tls import CHAIN, KEY

LIMIT = 8
WAIT = 30.0  # seconds
LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await reply_with(send, scope["scheme"].encode() + b" " + await read_body(receive))


@contextmanager
def serving(make_loop: Callable[[], asyncio.AbstractEventLoop], seconds: float = 60.0, connections: int = LIMIT) -> Iterator[Any]:
    """-> the address of a server with the test's certificate."""
    certificate = load_certificate(ServerSection(ssl_certfile=str(CHAIN), ssl_keyfile=str(KEY)))
    server = HttpServer(echo, ConnectionLimits(connections, seconds), certificate)
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(server.serve([listener]))

    thread = threading.Thread(target=run, daemon=True)
    address = listener.getsockname()
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = server.force_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CHAIN))


def post(address: Any, body: bytes = b"hello") -> bytes:
    reply = httpx.post("https://{}:{}".format(*address), content=body, verify=trusting(), trust_env=False, timeout=WAIT)
    assert reply.status_code == 200
    return reply.content


def post_in_time(address: Any) -> bytes:
    """A server that has not heard of all ends yet refuses the first tries; a slow machine's own
    handshake may take too long."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            return post(address)
    raise AssertionError("the places did not come back")


def closed(connections: list[socket.socket], count: int) -> list[socket.socket]:
    """Those that the server ended, once they are so many."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        readable, _, _ = select.select(connections, [], [], 0.1)
        if len(readable) >= count:
            return readable
    raise AssertionError(f"not even {count} connections were ended")


@pytest.mark.parametrize("make_loop", LOOPS)
def test_connections_without_a_handshake_are_counted(make_loop: Any) -> None:
    with serving(make_loop) as address, ExitStack() as clients:
        bare = [clients.enter_context(socket.create_connection(address)) for _ in range(3 * LIMIT)]
        ended = closed(bare, 2 * LIMIT)
        assert len(ended) == 2 * LIMIT  # as many as are allowed are kept
        with pytest.raises((httpx.ConnectError, httpx.ReadError)):
            post(address)
        for one in bare:
            one.close()
        assert post_in_time(address) == b"https hello"


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_handshake_has_a_time(make_loop: Any) -> None:
    with serving(make_loop, seconds=0.2) as address, ExitStack() as clients:
        slow = [clients.enter_context(socket.create_connection(address)) for _ in range(LIMIT)]
        slow[0].sendall(b"\x16\x03\x01\x02\x00\x01")  # a part of one
        assert len(closed(slow, LIMIT)) == LIMIT
        assert post_in_time(address) == b"https hello"


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_comes_with_the_end_of_the_handshake_is_read(make_loop: Any) -> None:
    """Requests whose bytes arrive together with the last bytes of the handshake, from many clients
    at once."""

    def request(_: int) -> bytes:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with socket.create_connection(address, timeout=WAIT) as connection:
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    if outgoing.pending:
                        connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))
            client.write(REQUEST)
            connection.sendall(outgoing.read())  # the handshake's end and the request in one piece
            found = b""
            while True:
                try:
                    found += client.read(65536) or b""
                    if found.endswith(b"hello"):
                        return found
                except ssl.SSLWantReadError:
                    piece = connection.recv(65536)
                    assert piece, found
                    incoming.write(piece)

    with serving(make_loop, connections=256) as address, ThreadPoolExecutor(8) as pool:
        assert all(reply.endswith(b"https hello") for reply in pool.map(request, range(200)))


@pytest.mark.parametrize("make_loop", LOOPS)
def test_large_bodies_and_what_is_no_http(make_loop: Any) -> None:
    with serving(make_loop) as address:
        body = b"x" * 5_000_000
        assert post(address, body) == b"https " + body
        with trusting().wrap_socket(socket.create_connection(address, timeout=WAIT), server_hostname="127.0.0.1") as client:
            client.sendall(b"no HTTP\r\n\r\n")
            found = b""
            with contextlib.suppress(ssl.SSLError):
                while piece := client.recv(65536):
                    found += piece
            assert found.startswith(b"HTTP/1.1 400")
        with socket.create_connection(address, timeout=WAIT) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            with contextlib.suppress(OSError):
                assert b"200" not in plain.recv(65536)
