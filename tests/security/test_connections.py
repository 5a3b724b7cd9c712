"""Limits of connections: invalid HTTP, endless headers, clients that do not send or read, too many
clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from uvicorn.server import ServerState

from frame.entrypoints.http import request_context
from frame.entrypoints.http.errors import ApiError, public
from frame.entrypoints.http.protocol.bodies import _SLICE, MAX_LEVELS, MAX_VALUES, Bodies, problem_of
from frame.entrypoints.http.protocol.connections import LARGEST_HEAD, MAX_HEADERS, ConnectionLimits, GuardedProtocol
from frame.entrypoints.http.request_context import RequestContext
from tests.entrypoints.inprocess import serving

PATIENT, HASTY = 60.0, 0.05  # seconds
WAIT = 30.0


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Responds with as many bytes as the path says; does not read the body."""
    size = int(scope["path"].strip("/") or 2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(size).encode())]})
    await send({"type": "http.response.body", "body": b"x" * size})


@asynccontextmanager
async def listening(app: Any = echo, seconds: float = PATIENT, connections: int = 16) -> AsyncIterator[Any]:
    """Yields a function that connects."""
    config = uvicorn.Config(app, http=GuardedProtocol, lifespan="off", log_config=None, ws="none", timeout_keep_alive=PATIENT)
    config.load()
    limits = ConnectionLimits(connections, seconds)
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: partial(GuardedProtocol, limits=limits)(config, state, {}), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        for connection in list(state.connections):
            connection.transport.abort()
        server.close()


async def talk(connect: Any, *parts: bytes) -> bytes:
    """Send the parts, and read until the server closes the connection."""
    reader, writer = await connect()
    async with asyncio.timeout(WAIT):
        with contextlib.suppress(OSError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        found = b""
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                found += piece
        return found


async def test_a_client_that_sends_a_body_too_large_sees_the_answer() -> None:
    """It reads after it has sent everything: the rest is taken before the connection is closed."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        context = RequestContext(scope, receive, send, max_body=1000)
        try:
            await context.body()
        except ApiError as error:
            await context.fail(error)

    size = 8_000_000
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size
    async with listening(refuse) as connect:
        reader, writer = await connect()
        writer.write(head + b"x" * size)
        async with asyncio.timeout(WAIT):
            await writer.drain()
            assert (await reader.read()).startswith(b"HTTP/1.1 413 ")


def status(reply: bytes) -> int:
    """The status of an error response, which must have the error shape of the API."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = msgspec.json.decode(body)["error"]
    assert error["message"] and error["type"]
    return int(head.split()[1])


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,
     b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
     b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
     b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"],
)  # fmt: skip
async def test_invalid_http_is_refused(request_bytes: bytes) -> None:
    async with listening() as connect:
        assert status(await talk(connect, request_bytes)) == 400
        reader, writer = await connect()  # other clients are served
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), WAIT)).startswith(b"HTTP/1.1 200")


async def test_heads_have_a_size() -> None:
    endless = b"GET / HTTP/1.1\r\nx: " + b"a" * (4 * LARGEST_HEAD)
    many = b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: 1\r\n" % i for i in range(MAX_HEADERS + 1)) + b"\r\n"
    large = b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: %s\r\n" % (i, b"v" * 8192) for i in range(8)) + b"\r\n"
    path = b"GET /" + b"a" * (4 * LARGEST_HEAD) + b" HTTP/1.1\r\n\r\n"
    name = b"GET / HTTP/1.1\r\n" + b"n" * (4 * LARGEST_HEAD)
    async with listening() as connect:
        for head in (endless, many, large, path, name):
            assert status(await talk(connect, head)) == 431
        start = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        fits = start + b"".join(b"h%d: %s\r\n" % (i, b"v" * 400) for i in range(100)) + b"\r\n"
        just = start + b"x: " + b"a" * (LARGEST_HEAD - 100) + b"\r\n\r\n"
        for parts in ((fits,), (just,), (just[:999], just[999:])):
            assert (await talk(connect, *parts)).startswith(b"HTTP/1.1 200")


async def test_heads_of_pipelined_requests_count_one_by_one() -> None:
    one, last = b"GET / HTTP/1.1\r\nhost: x\r\nx: %s\r\n\r\n" % (b"a" * 1000), b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with listening() as connect:
        assert (await talk(connect, one * 100 + last)).count(b"HTTP/1.1 200") == 101
        assert b"HTTP/1.1 431" in await talk(connect, one + b"GET / HTTP/1.1\r\nx: ", *(b"a" * 8192 for _ in range(10)))


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n"])
async def test_headers_have_a_time_limit(sent: bytes) -> None:
    async with listening(seconds=HASTY) as connect:
        assert status(await talk(connect, sent)) == 408


async def test_second_request_and_unread_body_have_a_time_limit() -> None:
    async with listening(seconds=HASTY) as connect:
        reply = await talk(connect, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HT")
        assert reply.startswith(b"HTTP/1.1 200")  # then the incomplete request ends the connection
        reply = await talk(connect, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc", b"d")
        assert reply.startswith(b"HTTP/1.1 200")


async def test_clients_that_do_not_read_are_disconnected() -> None:
    async with listening(seconds=HASTY) as connect:
        reader, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /200000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(4 * HASTY)  # the time in which the client does not read
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        size = 0
        async with asyncio.timeout(WAIT):
            with contextlib.suppress(OSError):
                while piece := await reader.read(1 << 20):
                    size += len(piece)
        assert size < 200000000


async def test_number_of_connections_is_limited() -> None:
    async with listening(connections=3) as connect:
        open_ones = [await connect() for _ in range(3)]
        for reader, writer in open_ones:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), WAIT)).startswith(b"HTTP/1.1 200")
        refused = await talk(connect)
        assert status(refused) == 503
        assert b"retry-after" in refused
        open_ones[0][1].close()
        await open_ones[0][1].wait_closed()
        async with asyncio.timeout(WAIT):
            while not (await talk(connect, b"GET / HTTP/1.1\r\nHost: x\r\nconnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200"):
                pass  # the server has not seen the end of the connection yet


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with listening() as connect:
        end = b" HTTP/1.1\r\nhost: x\r\n"
        reply = await talk(connect, b"GET /1" + end + b"\r\nGET /2" + end + b"\r\nGET /3" + end + b"connection: close\r\n\r\n")
        assert [len(part.partition(b"\r\n\r\n")[2]) for part in reply.split(b"HTTP/1.1 200")[1:]] == [1, 2, 3]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_request_is_told_that_its_client_left_before_later_ones(is_refused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also while pipelined requests wait behind it; what the route then leaves out is no error."""
    started, told = asyncio.Event(), asyncio.Event()

    async def run_long(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        started.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    async with listening(run_long) as connect, asyncio.timeout(WAIT):
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        await started.wait()
        if is_refused:
            writer.write(b"no HTTP\r\n\r\n")
        else:
            writer.transport.abort()
        await told.wait()
        await asyncio.sleep(0.1)
    assert not [record for record in caplog.records if "without completing" in record.message]


async def tell(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, then responds with the headers of the request."""
    while (await receive()).get("more_body"):
        pass
    body = b"\n".join(name + b": " + value for name, value in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("parts", [(CHUNKED, b"2\r\nhi\r\n0\r\n"), (CHUNKED + b"2\r\nhi\r\n0\r\n",), (CHUNKED, b"0\r\n")])
async def test_trailers_are_no_headers(parts: tuple[bytes, ...]) -> None:
    trailers = b"x-api-key: secret\r\nauthorization: Bearer secret\r\nexpect: 100-continue\r\n\r\n"
    for sent in ((*parts, trailers), (b"".join((*parts, trailers)),)):
        async with listening(tell) as connect:
            reply = await talk(connect, *sent)
            assert reply.startswith(b"HTTP/1.1 200"), reply
            assert b"transfer-encoding: chunked" in reply and b"secret" not in reply and b"100" not in reply.split(b"\r\n\r\n")[1]


@pytest.mark.parametrize("framing", [b"content-length: 1", b"transfer-encoding: identity"])
async def test_trailers_do_not_change_the_framing(framing: bytes) -> None:
    async with listening(tell) as connect:
        sent = CHUNKED.replace(b"connection: close\r\n", b"") + b"0\r\n" + framing + b"\r\n\r\n"
        reply = await talk(connect, sent + b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 400") or reply.count(b"HTTP/1.1 200") == 2, reply


async def test_trailer_is_not_used_as_api_key() -> None:
    async with serving({"server": {"api_key": "secret"}}) as server, listening(server.app) as connect:
        request = CHUNKED.replace(b"POST /", b"POST /tokenize") + b'12\r\n{"prompt": "hi!!"}\r\n0\r\n'
        assert (await talk(connect, request + b"x-api-key: secret\r\n\r\n")).startswith(b"HTTP/1.1 401")
        with_key = request.replace(b"host: x", b"host: x\r\nx-api-key: secret")
        assert (await talk(connect, with_key + b"x-api-key: other\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_trailer_size_is_limited() -> None:
    async with listening(tell) as connect:
        assert status(await talk(connect, CHUNKED, b"0\r\n", b"x: y\r\n" * (MAX_HEADERS + 1))) == 431
    async with listening(tell) as connect:
        assert status(await talk(connect, CHUNKED, b"0\r\n", b"x: " + b"y" * (2 * LARGEST_HEAD + 1) + b"\r\n\r\n")) == 431
    # No line ends, so no parser event comes
    for endless in (b"0\r\nx: ", b"2\r\nhi\r\n0\r\nx: ", b"2;x="):
        async with listening(tell) as connect:
            assert status(await talk(connect, CHUNKED, endless, *[b"y" * LARGEST_HEAD] * 4)) == 431


async def test_request_after_trailers_has_only_its_own_headers() -> None:
    async with listening(tell) as connect:
        first = CHUNKED.replace(b"connection: close\r\n", b"") + b"0\r\nx: trailer\r\n\r\n"
        reply = await talk(connect, first + b"GET / HTTP/1.1\r\nhost: x\r\ny: header\r\nconnection: close\r\n\r\n")
        assert b"trailer" not in reply and b"y: header" in reply
    # A request with an HTTP/2 upgrade is parsed again without it
    async with listening(tell) as connect:
        offer = b"GET / HTTP/1.1\r\nhost: x\r\ny: header\r\nconnection: Upgrade, close\r\nupgrade: h2c\r\n\r\n"
        assert b"y: header" in await talk(connect, offer)


# clients that send no more ------------------------------------------------------------------------


@asynccontextmanager
async def waiting(version: bytes = b"1.1", starts: bool = False) -> AsyncIterator[tuple[Any, Any, asyncio.Event, asyncio.Event]]:
    """(reader, writer, event that lets the response end, event of the disconnect), after a request
    whose response has not ended. `starts`: it has begun."""
    received, go_on, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        received.set()
        ended = asyncio.create_task(go_on.wait())
        disconnected = asyncio.create_task(receive())
        await asyncio.wait({ended, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if disconnected.done() and disconnected.result()["type"] == "http.disconnect":
            gone.set()
            ended.cancel()
            return
        if not starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"last", "more_body": False})
        disconnected.cancel()

    async with listening(serve) as connect, asyncio.timeout(WAIT):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/%s\r\nhost: x\r\n\r\n" % version)
        await received.wait()
        yield reader, writer, go_on, gone


@pytest.mark.parametrize("starts", [False, True])
async def test_a_client_that_sends_no_more_receives_its_response(starts: bool) -> None:
    async with waiting(starts=starts) as (reader, writer, go_on, gone):
        writer.write_eof()
        await asyncio.sleep(0.2)  # the time in which a client that is gone is noticed
        assert not gone.is_set()
        go_on.set()
        reply = (await reader.read()).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 200") and reply.endswith(b"4\r\nlast\r\n0\r\n\r\n")


async def test_whole_requests_are_served_after_the_end_of_sending() -> None:
    async with listening() as connect:
        reader, writer = await connect()
        writer.write(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\nGET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write_eof()
        async with asyncio.timeout(WAIT):
            reply = await reader.read()
        assert reply.count(b"HTTP/1.1 200") == 2


async def test_a_client_that_is_gone_is_noticed_before_the_response() -> None:
    async with waiting() as (_, writer, _, gone):
        writer.close()
        await gone.wait()
    async with waiting(b"1.0") as (_, writer, _, gone):
        writer.write_eof()  # HTTP/1.0 has no interim response that would tell the two apart
        await gone.wait()


@pytest.mark.parametrize(("head", "expected"), [
    (b"GET / HTTP/1.1\r\n\r\n", 400), (b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi", 400),
    (b"GET / HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n", 200), (b"GET / HTTP/1.0\r\n\r\n", 200),
])  # fmt: skip
async def test_http_1_1_needs_a_host(head: bytes, expected: int) -> None:
    async with listening() as connect:
        reply = await talk(connect, head)
        assert int(reply.split()[1]) == expected
        assert expected == 200 or b"no Host header" in reply


# bodies -------------------------------------------------------------------------------------------


def test_json_depth_is_limited() -> None:
    n = MAX_LEVELS
    assert problem_of(b"[" * n + b"]" * n) is None
    assert "deeper" in (problem_of(b"[" * (n + 1)) or "")
    assert problem_of(b"[1]," * 10 * n) is None
    assert problem_of(b'"' + b"[" * 10 * n + b'"') is None
    # The brackets are outside the string
    assert "deeper" in (problem_of(b'"\\\\"' + b"[" * (n + 1)) or "")
    assert problem_of(b'"\\"' + b"[" * (n + 1) + b'"') is None  # the brackets are inside the string
    assert "deeper" in (problem_of(b'["x",' * 70_000) or "")


@pytest.mark.parametrize(("piece", "sentence"), [
    (b"[],", "lists, objects and keys"), (b"{},", "lists, objects and keys"), (b'{"a":1},', "lists, objects and keys"),
    (b'"",', "values"), (b"1,", "values"),
], ids=["lists", "objects", "keys", "texts", "numbers"])  # fmt: skip
def test_json_of_many_values_is_refused_undecoded(piece: bytes, sentence: str) -> None:
    assert sentence in (problem_of(b"[" + piece * MAX_VALUES * 2 + b"0]") or "")
    assert problem_of(b"[" + piece * 1000 + b"0]") is None
    # Inside a string
    assert problem_of(msgspec.json.encode((piece * MAX_VALUES * 2).decode())) is None


@pytest.mark.parametrize("size", [_SLICE - 2, _SLICE - 1, _SLICE, _SLICE + 1])
def test_escapes_at_the_end_of_a_slice(size: int) -> None:
    for text in ("x" * size + '"' + "[" * 200, "x" * size + "\\" + '"' + "[" * 200, "\\" * size + "[" * 200):
        assert problem_of(msgspec.json.encode(text)) is None
        assert "deeper" in (problem_of(msgspec.json.encode(text) + b"[" * 200) or "")


async def test_deep_bodies_are_refused_on_every_route() -> None:
    deep = b"[" * 100_000
    for body in (deep, b'{"messages": ' + deep, b'{"messages": ' + deep + b"]" * 100_000 + b"}"):
        async with serving() as server:
            for path in ("/v1/chat/completions", "/generate", "/tokenize"):
                reply = await server.request("POST", path, body)
                assert reply.status == 400
                assert "nested" in reply.json()["error"]["message"]


def test_bodies_share_a_byte_limit() -> None:
    bodies = Bodies(maximum=100, pause=1.0)
    for owner, size in (("one", 50), ("two", 25), ("three", 12)):  # each leaves as much free as it holds
        bodies.take(size, owner)
        with pytest.raises(ApiError) as caught:
            bodies.take(1, owner)
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "too_many_bytes_of_client", 1)
    with pytest.raises(ApiError) as caught:
        bodies.take(14, "four")
    assert (caught.value.status, caught.value.retry_after) == (503, 1)
    for owner, size in (("one", 50), ("two", 25), ("three", 12)):
        bodies.give_back(size, owner)
    assert (bodies.held, bodies.held_by) == (0, {})


async def test_one_key_leaves_room_for_the_bodies_of_others(tmp_path: Path) -> None:
    """It holds bodies open without their last byte."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    size, body = 1 << 20, b'{"prompt": "hello", "max_tokens": 1}'
    sections = {"server": {"api_keys": str(keys), "max_body_bytes": size}}
    async with serving(sections) as server, listening(server.app, connections=64) as connect:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\ncontent-length: %d\r\n\r\n"
        open_ones = [await connect() for _ in range(20)]
        async with asyncio.timeout(WAIT):
            for _, writer in open_ones:
                writer.write(head % (b"one", size) + b"x" * (size - 1))
            refused = [asyncio.create_task(reader.readline()) for reader, _ in open_ones]
            await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
            first = [task.result() for task in refused if task.done()]
            reply = await talk(connect, (head % (b"two", len(body))).replace(b"host", b"connection: close\r\nhost") + body)
        assert reply.startswith(b"HTTP/1.1 200"), reply
        assert {line.split()[1] for line in first} == {b"429"}
        for task in refused:
            task.cancel()


@pytest.mark.parametrize("rate", [0.3, 3.0], ids=["slow", "fast"])
async def test_a_body_earns_its_time_by_bytes(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces come well within the pause between two. `rate`: of the bytes that are required."""
    monkeypatch.setattr(request_context, "MIN_RATE", 10_000)
    pause, step, count = 0.5, 0.05, 40
    left = [count]

    async def receive() -> Any:
        await asyncio.sleep(step)
        left[0] -= 1
        return {"type": "http.request", "body": b"x" * int(10_000 * step * rate), "more_body": left[0] > 0}

    context = RequestContext({"headers": []}, receive, receive, 1 << 20, bodies=Bodies(1 << 24, pause))
    if rate > 1:
        await context.body()
        assert left == [0]
        return
    with pytest.raises(ApiError) as caught:
        await context.body()
    assert (caught.value.status, "bytes a second" in caught.value.message) == (408, True)
    assert left[0] > 0


@pytest.mark.parametrize("sizes", [[5], [70_000], [0, 0], [70_000] * 9, [700] * 90, [1, 70_000, 2, 16_384, 16_383, 1]])
async def test_pieces_of_a_body_are_joined(sizes: list[int]) -> None:
    pieces = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    left = iter(pieces)

    async def receive() -> Any:
        piece = next(left, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    context = RequestContext({"headers": []}, receive, receive, 1 << 20, bodies=Bodies(1 << 24, 10.0))
    assert await context.body() == b"".join(pieces)


async def test_bytes_of_bodies_are_released() -> None:
    async with serving({"server": {"max_body_bytes": 2048}}) as server:
        for _ in range(40):  # many times the limit of all bodies
            assert (await server.request("POST", "/generate", b"x" * 2000)).status == 400
            assert (await server.request("POST", "/generate", b"x" * 3000)).status == 413


def test_public_sentences() -> None:
    assert public("OSError: /srv/models/secret/x.bin at 0x7ffd1234abcd") == "OSError: x.bin at 0x…"
    assert public("/srv/models/a has no template; use /v1/completions") == "a has no template; use /v1/completions"
    assert public("C:\\models\\secret\\x.bin is gone") == "x.bin is gone"
    assert public("use a/b or 1/2, see http://example.org/a/b/c") == "use a/b or 1/2, see http://example.org/a/b/c"
    assert public("the $ref '#/definitions/a' or 'a.json#/b/c'") == "the $ref '#/definitions/a' or 'a.json#/b/c'"
    assert "secret" not in ApiError(500, "no /srv/secret/x").message
