"""A gRPC client that sends what grpcio's does not: parts of messages, calls without any, frames of
any kind. Headers are sent as literals; of what comes, only the types of frames are read.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
MAX_FRAME = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: str, value: str) -> bytes:
    def text(data: bytes) -> bytes:
        size = len(data)
        return (bytes([size]) if size < 127 else b"\x7f" + bytes([(size - 127) % 128 | 128, (size - 127) // 128])) + data

    return b"\0" + text(name.encode()) + text(value.encode())


def prefix(size: int) -> bytes:
    """What comes before the bytes of a message."""
    return b"\0" + struct.pack(">I", size)


def head(path: str, key: str | None = None) -> bytes:
    """The header block of a call."""
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    pairs["content-type"] = "application/grpc"
    if key is not None:
        pairs["x-api-key"] = key
    return b"".join(literal(*pair) for pair in pairs.items())


class RawConnection:
    """One HTTP/2 connection; `ended` has the ids of streams that the server has ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._last = -1
        self.ended: set[int] = set()
        self.is_closed = asyncio.Event()
        self.changed = asyncio.Event()  # a stream has ended, or the connection
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: str, window: int = 65_535) -> Self:
        """`window`: how many bytes of a response are read."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window)))
        return cls(reader, writer)

    def call(self, path: str, body: bytes = b"", key: str | None = None, is_complete: bool = False) -> int:
        """Start a call and send the bytes; its stream."""
        self._writer.write(frame(HEADERS, END_HEADERS, self.take_stream(), head(path, key)))
        for at in range(0, len(body), MAX_FRAME):
            self._writer.write(frame(DATA, 0, self._last, body[at : at + MAX_FRAME]))
        if is_complete:
            self._writer.write(frame(DATA, END_STREAM, self._last))
        return self._last

    def take_stream(self) -> int:
        """The id of a new stream."""
        self._last += 2
        return self._last

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def wait_ended(self, count: int) -> None:
        """Until so many streams have ended, or the connection."""
        async with asyncio.timeout(30):
            while len(self.ended) < count and not self.is_closed.is_set():
                await self.changed.wait()
                self.changed.clear()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                size, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], int.from_bytes(head[5:], "big")
                payload = await self._reader.readexactly(size)
                if kind == SETTINGS and not flags & ACK:
                    self._writer.write(frame(SETTINGS, ACK, 0))
                if kind == PING and not flags & ACK:
                    self._writer.write(frame(PING, ACK, 0, payload))
                if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
                    self.ended.add(stream)
                    self.changed.set()
        except (OSError, asyncio.IncompleteReadError):
            self.is_closed.set()
            self.changed.set()

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()
