"""Requests with an `Upgrade` header: the connection stays HTTP/1.1 and no byte is lost."""

from __future__ import annotations

from typing import Any

import pytest

from frame.entrypoints.http.protocol.connections import GuardedProtocol
from frame.entrypoints.http.protocol.paced_parsing import UpgradeRefusingProtocol
from tests.entrypoints.http.protocol.asgi import read_body, reply_with
from tests.security.test_connections import listening, status, talk

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"


async def mirror(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the body."""
    await reply_with(send, f"{scope['method']} {scope['raw_path'].decode()} ".encode() + await read_body(receive))


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET, H2C.lower()])
async def test_an_upgrade_is_refused(upgrade: bytes) -> None:
    """As Java's HttpClient and `curl --http2` send it: the body and the requests after it are read
    as without the header."""
    head = b"POST /a%20b HTTP/1.1\r\nHost: x\r\n" + upgrade
    whole = head + b"Content-Length: 5\r\n\r\nhello"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with listening(mirror) as connect:
        for parts in ([whole + last], [whole[:-5], b"hello", last], [whole[:60], whole[60:], last], [chunked, last], [whole * 900 + last]):
            found = await talk(connect, *parts)
            assert found.count(b"POST /a%20b hello") == b"".join(parts).count(b"hello")
            assert found.endswith(b"GET / ")


async def test_a_tunnel_is_refused() -> None:
    async with listening(mirror) as connect:
        for target in (b"x:1", b"/path"):
            assert status(await talk(connect, b"CONNECT " + target + b" HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n")) == 400


def test_connections_use_the_protocol() -> None:
    assert issubclass(GuardedProtocol, UpgradeRefusingProtocol)
