"""Responses to HTTP/1.0 requests: no chunks and no status 100; the connection ends the body."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security.test_connections import listening, talk

PIECES = [b"data: 1\n\n", b"", b"data: 2\n\n" * 20_000]


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """Answers with pieces; under `/whole` their length is known."""
    await receive()
    known = [(b"Content-Length", str(sum(map(len, PIECES))).encode())] if scope["path"] == "/whole" else []
    await send({"type": "http.response.start", "status": 200, "headers": known})
    for piece in PIECES:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("path", [b"/", b"/whole"])
@pytest.mark.parametrize("option", [b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"])
async def test_the_end_of_the_connection_ends_the_body(path: bytes, option: bytes) -> None:
    async with listening(stream) as connect:
        found = await talk(connect, b"POST " + path + b" HTTP/1.0\r\nContent-Length: 2\r\n" + option + b"\r\nab")
    head, _, body = found.partition(b"\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200 ")
    assert body == b"".join(PIECES)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert (b"content-length" in head.lower()) == (path == b"/whole")


async def test_a_head_has_no_body() -> None:
    async with listening(stream) as connect:
        found = await talk(connect, b"HEAD / HTTP/1.0\r\n\r\n")
    assert found.endswith(b"connection: close\r\n\r\n")


async def test_http11_still_gets_chunks() -> None:
    async with listening(stream) as connect:
        found = await talk(connect, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"transfer-encoding: chunked" in found.partition(b"\r\n\r\n")[0]
    assert found.endswith(b"0\r\n\r\n")
