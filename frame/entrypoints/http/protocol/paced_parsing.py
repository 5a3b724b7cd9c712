"""`PacedProtocol`: an HTTP connection that parses what it received in portions; `ParsingQueue`
bounds the portions of all connections of a server in one turn of the event loop.

The parser calls Python for each header, chunk and request, so a read of 256 KiB may take 0.1 s and
more. Bytes beyond a portion wait, and their connection is not read meanwhile. The connection stays
HTTP/1.1 when a request has an `Upgrade` header. Used by `GuardedProtocol`, which counts the work in
units of about 2 us. Must not depend on a route.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

UNIT = 2e-6  # seconds
REQUEST_UNITS = 64  # for a request's head
PORTION_UNITS = 128  # after which a connection's other bytes wait
MAX_FIRST_UNITS = 4096  # of first portions in one turn
MAX_REST_UNITS = 1024  # of later portions in one turn
HEAD_SLICE, SLICE = 16 * 1024, 2 * 1024  # bytes that the parser gets at once; 128 headers are refused, chunks are many
MAX_CHUNKS = 64  # of a slice
UNIT_BYTES = 256  # of a body, which are copied twice, into memory that the kernel has to map and zero
MAX_SIZE_LINE = 20  # bytes of the line before a chunk's data, with its end
_LINE, _END = b"\r\n", b"\r\n\r\n"  # the end of a line; of a head, and of a chunked body

Waiting: TypeAlias = "dict[str, deque[PacedProtocol]]"  # by client address, in the order of their turns


class ParsingQueue:
    """The connections of one event loop with bytes to parse, round-robin by client address. A turn
    with `MAX_REST_UNITS` of later portions is followed by a pause of the same time."""

    def __init__(self) -> None:
        self._units = 0  # of first portions in this turn
        self._is_scheduled = False  # `_run_turn`
        self._first: Waiting = {}  # connections that have parsed nothing of what they received
        self._rest: Waiting = {}

    def is_open(self) -> bool:
        """Whether one more first portion may be parsed in this turn."""
        return self._units < MAX_FIRST_UNITS

    def count_units(self, units: int) -> None:
        """Count a first portion."""
        if not self._units:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._units += units

    def _begin_turn(self) -> None:
        self._units = 0

    def add(self, connection: PacedProtocol, *, is_first: bool) -> None:
        """Call `parse_portion` in a later turn. `is_first`: ahead of later portions."""
        address = connection.client[0] if connection.client else ""
        (self._first if is_first else self._rest).setdefault(address, deque()).append(connection)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._units = 0
        while self._first and self._units < MAX_FIRST_UNITS:
            self.count_units(_pop_next(self._first).parse_portion())
        units = 0
        while self._rest and units < MAX_REST_UNITS:
            units += _pop_next(self._rest).parse_portion()
        self._is_scheduled = bool(self._first or self._rest)
        if self._is_scheduled:
            delay = units * UNIT if units >= MAX_REST_UNITS and not self._first else 0.0
            asyncio.get_running_loop().call_later(delay, self._run_turn)


def _pop_next(waiting: Waiting) -> PacedProtocol:
    address = next(iter(waiting))
    connections = waiting.pop(address)
    connection = connections.popleft()
    if connections:
        waiting[address] = connections  # behind the other addresses
    return connection


class _PacedFlow(FlowControl):
    """`on_resume` decides whether the transport reads on."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self.on_resume = on_resume

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.on_resume()


class UpgradeRefusingProtocol(HttpToolsProtocol):
    """One connection of uvicorn, which stays HTTP/1.1 when a request has an `Upgrade` header.

    Java's HttpClient and `curl --http2` send `Upgrade: h2c` with a first request that has a body.
    The parser stops after the head of such a request, so the head is parsed again without the
    header. `asks_websocket` in the scope says that it asked for WebSocket: a route may then take
    the connection over, see `GuardedProtocol.hand_over`.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._has_upgrade = False  # the current head asks for another protocol; uvicorn does not see it
        self._asks_websocket = False  # the head that is parsed again does

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if self._has_upgrade:
                    data = self._head_without_upgrade() + data[stopped.args[0] :]
                    continue
                self.send_400_response("")
            except httptools.HttpParserError as error:
                log.debug("invalid HTTP: %s", error)
                self.send_400_response("")
            return

    def on_message_begin(self) -> None:
        self._has_upgrade = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_upgrade = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if not self._has_upgrade:
            if self._asks_websocket:
                self._asks_websocket, self.scope["asks_websocket"] = False, True  # type: ignore[typeddict-unknown-key]
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._has_upgrade:
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """The bytes of the current head without `Upgrade`, for a new parser."""
        old, self.parser = self.parser, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        version = old.get_http_version().encode("ascii")
        upgrades = [value.strip().lower() for name, value in self.headers if name == b"upgrade"]
        self._asks_websocket = upgrades == [b"websocket"] and old.get_method() == b"GET" and version == b"1.1"
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([old.get_method() + b" " + self.url + b" HTTP/" + version, *fields, b"\r\n"])


class PacedProtocol(UpgradeRefusingProtocol):
    """One connection. A subclass reports what the parser calls.

    The end of a slice is chosen by the sizes of chunks, so that large ones are not searched. What
    the bytes mean is the parser's decision alone.
    """

    def __init__(self, *arguments: Any, parsing: ParsingQueue, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._parsing = parsing
        self._received = b""  # bytes of which those from `_position` on are not parsed
        self._position = 0
        self._units = 0  # of the current portion
        self._is_queued = False
        self._has_waiting = False  # bytes wait; the transport does not read
        self._is_head = True  # between two requests, or in the head of one
        self._body_left = 0  # bytes of a body with a content-length
        self._ends_head = False  # the current slice ends where a head does
        self._is_chunked = False  # the next byte of the body is in a chunk, or in the line before its data
        self._chunk_left = 0  # bytes of the chunk and of its end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PacedFlow(transport, self._read_on)

    def connection_lost(self, exc: Exception | None) -> None:
        self._received, self._position = b"", 0
        if isinstance(self.flow, _PacedFlow):
            self.flow.on_resume = _do_nothing  # the flow outlives the connection with its last request
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received = self._received[self._position :] + data if self._received else data
        self._position = 0
        if self._is_queued:
            return
        if self._parsing.is_open():
            self._parsing.count_units(self.parse_portion())
        else:
            self._wait(is_first=True)

    def parse_portion(self) -> int:
        """Parse up to `PORTION_UNITS`, and queue the connection again where bytes are left. Returns
        the units."""
        self._is_queued = False
        self._units = 0
        is_partial = False
        while self._position < len(self._received) and self._units < PORTION_UNITS and not self.flow.read_paused:
            data, start = self._received, self._position
            end = min(self._slice_end(data, start), len(data))
            if is_partial := end == start:
                break
            self._position = end
            self._units += 1
            self.parse_bytes(data if end - start == len(data) else memoryview(data)[start:end])
        if is_partial or self._position >= len(self._received):
            self._received, self._position = self._received[self._position :], 0
            self._stop_waiting()
        else:
            self._has_waiting = True
            if not self.flow.read_paused:  # else `_read_on` queues the connection
                self._wait(is_first=False)
        return self._units

    def parse_bytes(self, data: bytes | memoryview) -> None:
        """Give the parser a slice, which holds one end of a request at most."""
        super().data_received(data)  # type: ignore[arg-type]

    def count_units(self, units: int) -> None:
        """Count work of the current slice."""
        self._units += units

    def begin_body(self, size: int) -> None:
        """A head has ended. `size`: its content-length, else 0."""
        self._is_head = False
        self._body_left = size
        self._is_chunked, self._chunk_left = self._ends_head and not size, 0
        self._units += REQUEST_UNITS

    def count_body(self, size: int) -> None:
        """So many bytes of the body came at once."""
        self._body_left = max(0, self._body_left - size)
        self._units += 1 + size // UNIT_BYTES

    def begin_head(self) -> None:
        """A head begins, or may."""
        self._is_head = True

    def drop_received(self) -> None:
        """Leave what waits unparsed, and read."""
        self._received, self._position = b"", 0
        self._stop_waiting()

    def _slice_end(self, data: bytes, start: int) -> int:
        """Where the next slice ends; `start` where it needs bytes that have not come."""
        if self._is_head:
            return self._head_end(data, start)
        if self._body_left:
            return start + self._body_left
        if self._is_chunked:
            end = self._chunks_end(data, start)
            if end > start or self._is_chunked:
                return end
        end_of_body = data.find(_END, max(0, start - len(_END) + 1), start + SLICE)
        return start + SLICE if end_of_body < 0 else end_of_body + len(_END)

    def _head_end(self, data: bytes, start: int) -> int:
        """The end of the head, or of a small request. A part of the empty line after a head is left
        until the rest of it comes, so that the body of a long request begins a slice."""
        limit = start + HEAD_SLICE
        head_end = data.find(_END, start, limit)
        self._ends_head = head_end >= 0
        if head_end < 0:
            if limit < len(data):
                return limit - len(_END)
            return len(data) - next((size for size in (3, 2, 1) if data.endswith(_END[:size], start)), 0)
        if len(data) - start <= SLICE and data.find(_END, head_end + 1) < 0:
            self._ends_head = head_end + len(_END) == len(data)
            return len(data)
        return head_end + len(_END)

    def _chunks_end(self, data: bytes, start: int) -> int:
        """The end of the chunks that have come, up to `MAX_CHUNKS`. The last chunk, trailers and
        chunk extensions are not looked through: they end `_is_chunked`."""
        end = min(start + self._chunk_left, len(data))
        self._chunk_left -= end - start
        for _ in range(MAX_CHUNKS):
            if end == len(data):
                break
            line = data.find(_LINE, end, end + MAX_SIZE_LINE)
            if line < 0 and len(data) - end < MAX_SIZE_LINE:
                break
            size = data[end:line] if line >= 0 else b""
            try:
                length = int(size, 16)
            except ValueError:
                length = 0
            if length <= 0:
                self._is_chunked = False
                break
            stop = line + len(_LINE) + length + len(_LINE)
            end = min(stop, len(data))
            self._chunk_left = stop - end
        return end

    def _wait(self, *, is_first: bool) -> None:
        if not self._is_queued and not self.transport.is_closing():
            self._is_queued = self._has_waiting = True
            self.transport.pause_reading()
            self._parsing.add(self, is_first=is_first)

    def _stop_waiting(self) -> None:
        if self._has_waiting:
            self._has_waiting = False
            if not self.flow.read_paused:
                self._read_on()

    def _read_on(self) -> None:
        """Parse what waits, or read where nothing does."""
        if not self._has_waiting:
            if not self.transport.is_closing():
                self.transport.resume_reading()
        elif self._is_queued:
            return
        elif self._parsing.is_open():
            self._parsing.count_units(self.parse_portion())
        else:
            self._wait(is_first=False)


def _do_nothing() -> None:
    pass
