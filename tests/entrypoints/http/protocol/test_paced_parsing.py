"""Where slices end: large chunks are not searched, and no slice holds more than one end of a
request, wherever the reads are cut."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from frame.entrypoints.http.protocol.connections import GuardedProtocol
from frame.entrypoints.http.protocol.paced_parsing import PORTION_UNITS, ParsingQueue
from tests.security.test_connections import listening, talk, tell

HOST = b"POST / HTTP/1.1\r\nhost: x\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """-> (bytes, requests that began) of each slice."""
    found: list[tuple[int, int]] = []
    parse, begin = GuardedProtocol.parse_bytes, GuardedProtocol.on_message_begin

    def parse_bytes(self: Any, data: Any) -> None:
        found.append((len(data), 0))
        parse(self, data)

    def on_message_begin(self: Any) -> None:
        found[-1] = (found[-1][0], found[-1][1] + 1)
        begin(self)

    monkeypatch.setattr(GuardedProtocol, "parse_bytes", parse_bytes)
    monkeypatch.setattr(GuardedProtocol, "on_message_begin", on_message_begin)
    return found


async def test_large_chunks_are_one_slice(slices: list[tuple[int, int]]) -> None:
    size = 16 * 1024
    chunks = (b"%x\r\n" % size + b"\r\n\r\n" * (size // 4) + b"\r\n") * 32
    async with listening(tell) as connect:
        reply = await talk(connect, HOST + b"transfer-encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n" + LAST)
    assert reply.count(b"HTTP/1.1 200") == 2
    assert len(slices) < 100


@pytest.mark.parametrize("size", [1 << 20, 4099, 97, 7])
async def test_requests_are_parsed_one_by_one(size: int, slices: list[tuple[int, int]]) -> None:
    """Also after a chunked body whose data looks like the line of a large chunk."""
    misleading = b"5\r\nffff\n\r\n" * 20 + b"1;x=y\r\nz\r\n0\r\nt: u\r\n\r\n"
    one = HOST + b"transfer-encoding: chunked\r\n\r\n" + misleading + HOST + b"content-length: 4\r\n\r\n\r\n\r\n"
    sent = one * 12 + LAST
    async with listening(tell) as connect:
        reply = await talk(connect, *(sent[at : at + size] for at in range(0, len(sent), size)))
    assert reply.count(b"HTTP/1.1 200") == 25
    assert max(begun for _, begun in slices) == 1


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_client_with_many_connections_delays_another_by_one_portion(is_first: bool) -> None:
    queue, order = ParsingQueue(), list[str]()

    class Connection:
        def __init__(self, address: str) -> None:
            self.client = (address, 1)

        def parse_portion(self) -> int:
            order.append(self.client[0])
            return PORTION_UNITS

    for _ in range(100):
        queue.add(cast("Any", Connection("10.0.0.1")), is_first=is_first)
    queue.add(cast("Any", Connection("10.0.0.2")), is_first=is_first)
    await asyncio.sleep(0.01)
    assert order[:3] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
