"""Connections whose framing costs the parser more than their data: the work in one turn of the
event loop is bounded for each connection and for all, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from frame.checkpoint.model_config import find_model
from frame.entrypoints.http.protocol.connections import ConnectionLimits, GuardedProtocol
from frame.entrypoints.http.protocol.listening import HttpServer
from tests.entrypoints.serving import RunningRouter, RunningServer
from tests.security.framing import CHUNKED, PATTERNS
from tests.security.test_connections import listening, status, talk, tell

WAIT = 30.0  # seconds
SENT = 1 << 18  # bytes of all connections
MAX_CALLS = 6_000  # of the parser in one turn; 256 KiB of chunks of one byte make 43,000
MAX_COPIED = 18 << 20  # bytes of bodies in one turn; 128 reads are 32 MiB
REQUEST_CALLS = 64  # that a request counts as


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """-> the parser's calls of Python since the list was cleared."""
    made = [0]

    def count(name: str, weight: int) -> None:
        method = getattr(GuardedProtocol, name)

        def counted(self: Any, *arguments: Any) -> None:
            made[0] += weight
            method(self, *arguments)

        monkeypatch.setattr(GuardedProtocol, name, counted)

    for name, weight in (("on_header", 1), ("on_body", 1), ("on_headers_complete", REQUEST_CALLS)):
        count(name, weight)
    return made


@asynccontextmanager
async def max_calls(calls: list[int]) -> AsyncIterator[list[int]]:
    """Yields a list with the highest number of calls in one turn, and of all turns."""
    found = [0, 0]

    async def watch() -> None:
        while True:
            found[0], found[1], calls[0] = max(found[0], calls[0]), found[1] + calls[0], 0
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    yield found
    watching.cancel()


@pytest.mark.parametrize("connections", [1, 20])
@pytest.mark.parametrize("pattern", PATTERNS)
async def test_one_turn_of_the_loop_parses_a_bounded_amount(pattern: str, connections: int, calls: list[int]) -> None:
    head, body = PATTERNS[pattern]
    size = SENT // connections
    data = head + (body * (size // len(body) + 1))[:size]
    async with listening(tell, connections=64) as connect, max_calls(calls) as found:

        async def send() -> None:
            reader, writer = await connect()
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
                writer.write_eof()
                while await reader.read(1 << 16):
                    pass

        async with asyncio.timeout(WAIT):
            await asyncio.gather(*(send() for _ in range(connections)))
    assert found[0] <= MAX_CALLS, found
    assert found[1] > 0 or pattern == "empty lines"


async def test_one_turn_of_the_loop_copies_a_bounded_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 clients upload at once, each as fast as it can."""
    copied, size = [0], 1 << 20
    on_body = GuardedProtocol.on_body

    def counted(self: Any, body: bytes) -> None:
        copied[0] += len(body)
        on_body(self, body)

    monkeypatch.setattr(GuardedProtocol, "on_body", counted)
    async with listening(read_all, connections=256) as connect, max_calls(copied) as found:
        clients = [await connect() for _ in range(128)]
        for _, writer in clients:
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        async with asyncio.timeout(WAIT):
            for reader, writer in clients:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                writer.close()
    assert found[1] == 128 * size
    assert found[0] <= MAX_COPIED, found


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def test_chunks_smaller_than_their_framing_end_the_connection() -> None:
    async with listening(tell) as connect:
        reply = await talk(connect, CHUNKED, b"1\r\nx\r\n" * 100_000)
        assert status(reply) == 400
        assert b"send larger chunks" in reply
        reply = await talk(connect, CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), b"1\r\nx\r\n" * 5_000, b"0\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 200")  # a small body may come byte by byte


async def test_bytes_that_wait_keep_their_order() -> None:
    """Pipelined requests with bodies of both kinds, in pieces of any size."""

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    bodies = [b"%d\r\n\r\n" % number * 3_000 for number in range(8)]
    sent, host = b"", b"POST / HTTP/1.1\r\nhost: x\r\n"
    for number, body in enumerate(bodies):
        if number % 2:
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[at : at + 700]), body[at : at + 700]) for at in range(0, len(body), 700))
            sent += host + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        else:
            sent += host + b"content-length: %d\r\n\r\n" % len(body) + body
    for size in (1 << 20, 4099, 61):
        async with listening(echo) as connect:
            reader, writer = await connect()
            async with asyncio.timeout(WAIT):
                for at in range(0, len(sent), size):
                    writer.write(sent[at : at + size])
                    await writer.drain()
                for body in bodies:
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                    assert await reader.readexactly(len(body)) == body


async def test_connections_are_opened_a_few_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = [0]
    connection_made = GuardedProtocol.connection_made

    def counted(self: Any, transport: Any) -> None:
        opened[0] += 1
        connection_made(self, transport)

    monkeypatch.setattr(GuardedProtocol, "connection_made", counted)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(400)]
    for client in clients[:200]:
        client.close()  # they leave before they are accepted
    server = HttpServer(tell, ConnectionLimits(1000, WAIT))
    async with max_calls(opened) as found:
        serving = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(WAIT):
            while found[1] < 200:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0)
        server.should_exit = server.force_exit = True
        await serving
    for client in clients:
        client.close()
    assert found[0] <= 16
    assert found[1] < 400 - 150


# processes ----------------------------------------------------------------------------------------


def health_times(url: str, seconds: float) -> list[float]:
    found, until = [], time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=WAIT) as client:
        while time.monotonic() < until:
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            found.append(time.monotonic() - started)
            time.sleep(0.01)
    return found


@contextlib.contextmanager
def attack(url: str, pattern: str, connections: int, megabytes: float) -> Any:
    parts = urlsplit(url)
    arguments = (str(parts.hostname), str(parts.port), pattern, str(connections), str(megabytes))
    process = subprocess.Popen([sys.executable, "-m", "tests.security.framing", *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("has_router", [False, True], ids=["server", "router"])
def test_others_are_served_meanwhile(has_router: bool, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RunningServer(Path(find_model("frame-tiny")), "--api-keys", str(keys), "--max-model-len", "512"))
        url = stack.enter_context(RunningRouter(server.url)).url if has_router else server.url
        for pattern, connections in (("chunks of one byte", 1), ("chunks of six bytes", 20), ("requests", 20), ("trailers", 1)):
            with attack(url, pattern, connections, 10):
                times = health_times(url, 1.0)
            assert statistics.median(times) < 0.25, (pattern, times)  # before: 1 to 24 s
