"""`GuardedProtocol`: uvicorn's HTTP connection with limits: number of connections, size and time of
a request's head, time in which a client reads nothing of a response.

Invalid HTTP and exceeded limits get a response in the API's error shape. `RequestContext` bounds
bodies. Must not depend on a route.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, DisconnectedError, ResponseCutError
from frame.entrypoints.http.protocol.paced_parsing import PacedProtocol, ParsingQueue

log = logging.getLogger(__name__)

MAX_HEADERS = 128
LARGEST_HEAD = 64 * 1024  # bytes of request line and headers together; and by which a body's framing may exceed its data
SEPARATORS = 4  # bytes of a header beside its name and value
FIRST_CHECK, CHECK_INTERVAL = 0.05, 1.0  # seconds between looks at a client that sends no more
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # every HTTP/1.1 client takes it before a response (RFC 9110, section 15.2)
TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)  # Linux
TCP_CLOSED = 7  # the first byte of TCP_INFO
MIN_IDLE = 1.0  # seconds after which an idle connection is closed where a new one finds no place
LINGER = 1.0  # seconds that a refused client has to read the error
MAX_LINGERING = 128  # refused connections that are given this time
SUBPROTOCOL_KEY = b"openai-insecure-api-key."  # what a subprotocol with a key begins with, as in the OpenAI API
SPARE_FILES = 256 + MAX_LINGERING  # descriptors for everything but connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`client_timeout` in seconds: for a whole head, and for a client that does not read.
    `lingering`: refused connections that are not closed yet. `parsing`: work of all connections.
    `bound`: what sets `max_connections`, for the error. `idle`: connections without a request, with
    the event loop's time since when, the oldest first.
    """

    max_connections: int
    client_timeout: float
    lingering: set[asyncio.Protocol] = field(default_factory=set)
    parsing: ParsingQueue = field(default_factory=ParsingQueue)
    bound: str = "server.max_connections allows"
    idle: dict[GuardedProtocol, float] = field(default_factory=dict)

    def close_idlest(self, now: float) -> bool:
        """Close the connection that has been idle longest, for a new one; False: none has been for
        `MIN_IDLE`. `now`: the event loop's time."""
        connection, since = next(iter(self.idle.items()), (None, now))
        if connection is None or now - since < MIN_IDLE:
            return False
        connection.close_idle()
        return True


class GuardedProtocol(PacedProtocol):
    """One connection. At most one timer runs for its reading side (`_reading`) and one for its
    writing side (`_writing`)."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **keywords: Any) -> None:
        super().__init__(*arguments, parsing=limits.parsing, **keywords)
        self._limits = limits
        self._has_begun = False  # a head has
        self._has_host = False  # the head has a Host header
        self._head_bytes = 0  # received of the head, or since the last bytes of the body: chunk extensions and trailers
        self._parsed_bytes = 0  # of them: in the URL and in complete headers
        self._num_headers = 0  # trailers too
        self._body_size = 0  # of the current request: its content-length
        self._framing = 0  # bytes of a chunked body's framing, less those of its data
        self._has_body = False  # bytes of a body came with the slice at hand
        self._has_ended = False  # a request ended with the slice at hand
        self._refusal: ApiError | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._probe: DisconnectProbe | None = None  # the client sends no more
        self._running: Any = None  # the cycle that is being served; `cycle` is that of the last request, which may wait behind it

    # the connection -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        maximum = self._limits.max_connections
        if len(self.connections) > maximum and not self._limits.close_idlest(self.loop.time()):
            self._refuse(ApiError(503, f"{maximum} connections are open, all that {self._limits.bound}; try again later"))
        else:
            self._limits.idle[self] = self.loop.time()
            self._await_reading()

    def close_idle(self) -> None:
        """Close the connection, which has no request."""
        self._limits.idle.pop(self, None)
        if self.transport.can_write_eof():
            self.transport.close()
        else:  # over TLS, `close` waits for the client
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        if self._probe is not None:
            self._probe.close()
        self.resume_writing()
        self._limits.lingering.discard(self)
        self._limits.idle.pop(self, None)
        self._disconnect(self._running)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """A connection without a transport is in its handshake, which its listener ends."""
        if self.transport is not None:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client does not read: close the connection after `client_timeout`."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self._limits.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    # requests -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refusal is None:  # else it is being closed
            self._limits.idle.pop(self, None)  # its request may wait to be parsed
            super().data_received(data)

    def parse_bytes(self, data: bytes | memoryview) -> None:
        was_head, self._has_body, self._has_ended = self._is_head, False, False
        super().parse_bytes(data)
        if self._refusal is not None or self.transport.is_closing():
            self.drop_received()
            return
        try:
            if was_head == self._is_head and not self._has_body and not self._has_ended:
                self._head_bytes = self._within_head(self._head_bytes + len(data))
            elif not was_head and not self._body_size:
                self._check_framing(len(data))
        except ApiError as error:
            self._refuse(error)
            return
        is_complete = self.cycle is None or self.cycle.response_complete
        if is_complete and self._reading is None:  # part of a head, or the rest of a body that was not read
            self._await_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It receives the responses to its whole requests, as far as a
        client that reads can be told from one that is gone."""
        cycle = self.cycle
        is_whole = cycle is not None and not cycle.response_complete and self._is_head and not self._has_begun
        if self._refusal is not None or not is_whole or not DisconnectProbe.can_watch(self.transport):
            return False
        is_waiting = not cycle.response_started and not self.pipeline
        if is_waiting and cycle.scope["http_version"] in ("0.9", "1.0"):
            return False  # such clients know no interim responses
        cycle.keep_alive = False
        if self._probe is None:
            self._probe = DisconnectProbe(self.transport, may_write=is_waiting)
        return True

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or a refusal that was raised in the parser's callbacks."""
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request; send HTTP/1.1"))

    def on_message_begin(self) -> None:
        self._head_bytes = self._parsed_bytes = self._num_headers = self._body_size = self._framing = 0
        self._has_begun = True
        self._has_host = False
        self.begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed_bytes = self._within_head(self._parsed_bytes + len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after a chunked body. Trailers are dropped: they bring no
        credentials and change no framing."""
        self._parsed_bytes = self._within_head(self._parsed_bytes + len(name) + len(value) + SEPARATORS)
        self._num_headers += 1
        self.count_units(1)
        if self._num_headers > MAX_HEADERS:
            self._raise(f"the request has more than {MAX_HEADERS} headers; send fewer")
        if not self._is_head:
            return
        key = name.lower()
        if key == b"host":
            if self._has_host:
                self._raise("the request has two Host headers; send one", 400)  # a proxy in front may have read the other
            self._has_host = True
        if key == b"content-length" and value.isdigit():
            self._body_size = int(value)
        if key == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._raise("the request has a transfer-encoding other than chunked; send chunked or content-length", 400)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._head_bytes = self._parsed_bytes = 0
        self._framing -= 2 * len(body)  # of the slice's bytes, all of which `_check_framing` adds
        self.count_body(len(body))
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if not self._has_host and self.parser.get_http_version() not in ("0.9", "1.0"):
            self._raise("the request has no Host header; send one, as HTTP/1.1 requires", 400)
        self._has_begun = False
        self.begin_body(self._body_size)
        self._stop_reading_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_ended = True
        self.begin_head()
        self._stop_reading_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        is_idle = self._is_head and not self._has_begun
        if not self.cycle.response_complete:
            return
        if is_idle and not self._has_waiting:
            self._limits.idle[self] = self.loop.time()
        elif not is_idle and self._reading is None:
            self._await_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] in ("0.9", "1.0"):
            cycle.keep_alive = False
            cycle.send = CloseDelimited(cycle)
        self._running = cycle
        if cycle.scope.pop("asks_websocket", False):
            cycle.scope["hand_over"] = partial(self.hand_over, cycle)
            _add_key(cycle.scope["headers"])
        super()._start_asgi_task(cycle, partial(_run_or_cut, cycle, app))

    def hand_over(self, cycle: Any, successor: Successor) -> asyncio.Transport:
        """Let another protocol have the connection, whose request has had no response: it writes
        that too. The request goes on until its route returns, and the connection counts until it
        ends. Raises ApiError 400 where the client has sent more than the request."""
        if self.cycle is not cycle or cycle.more_body or not self._is_head or self._has_begun or self._has_waiting:
            raise ApiError(400, "a WebSocket begins after the response to its handshake; send nothing before it")
        if self.transport.is_closing():
            raise DisconnectedError
        self._stop_reading_timer()
        self.resume_writing()
        if self._probe is not None:
            self._probe.close()
        cycle.disconnected = True  # uvicorn writes no response
        successor.predecessor = self
        self.transport.set_protocol(successor)
        self.transport.resume_reading()
        return self.transport

    # limits ---------------------------------------------------------------------------------------

    def _within_head(self, size: int) -> int:
        if size > LARGEST_HEAD:
            self._raise(f"the request line and headers are larger than {LARGEST_HEAD} bytes; send less")
        return size

    def _check_framing(self, size: int) -> None:
        """Count `size` bytes of a chunked body."""
        self._framing += size
        if self._framing > LARGEST_HEAD:
            self._raise("the framing of the body's chunks is larger than their data; send larger chunks, or content-length", 400)

    def _raise(self, sentence: str, status: int = 431) -> None:
        self._refusal = ApiError(status, sentence)
        raise self._refusal

    def _await_reading(self) -> None:
        self._reading = self.loop.call_later(self._limits.client_timeout, self._too_slow)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _too_slow(self) -> None:
        self._reading = None
        if self.cycle is not None and not self.cycle.response_complete:
            return  # a request is being served; its body has a time limit of its own
        if self._is_head and self.cycle is None:
            seconds = self._limits.client_timeout
            self._refuse(ApiError(408, f"no whole request came within {seconds:g} s; send it at once"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close."""
        self._refusal = error
        self.drop_received()
        self._stop_reading_timer()
        if self.transport.is_closing():
            return
        cycle = self.cycle if self._running is None or self._running.response_complete else self._running
        if cycle is not None and cycle.response_started and not cycle.response_complete:  # in the midst of a response there is no other
            self.transport.close()
            return
        self._disconnect(cycle)
        body = error.body()
        retry = b"retry-after: %d\r\n" % RETRY_AFTER if error.status == 503 else b""
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + retry + b"\r\n" + body)
        if len(self._limits.lingering) >= MAX_LINGERING or not self.transport.can_write_eof():  # TLS has no half-closed state
            self.transport.close()
        else:  # to close with bytes unread would reset the connection, and the client might not see the response
            self.connections.discard(self)
            self._limits.lingering.add(self)
            self._reading = self.loop.call_later(LINGER, self.transport.abort)
            with suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()

    @staticmethod
    def _disconnect(cycle: Any) -> None:
        """Let the route that serves the cycle receive http.disconnect, unless it has finished."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()


class Successor(asyncio.Protocol):
    """A protocol that takes a connection over."""

    predecessor: GuardedProtocol

    def connection_lost(self, exc: Exception | None) -> None:
        self.predecessor.connection_lost(exc)


def _add_key(headers: list[tuple[bytes, bytes]]) -> None:
    """Add the key that a page's WebSocket brings as a subprotocol, since it can set no headers."""
    offered = b",".join(value for name, value in headers if name == b"sec-websocket-protocol").split(b",")
    key = next((each.strip().removeprefix(SUBPROTOCOL_KEY) for each in offered if each.strip().startswith(SUBPROTOCOL_KEY)), None)
    if key is not None and not any(name == b"authorization" for name, _ in headers):
        headers.append((b"authorization", b"Bearer " + key))


class CloseDelimited:
    """The `send` of uvicorn's cycle of one HTTP/1.0 request, after whose response uvicorn closes
    the connection. HTTP/1.0 has no chunks: the end of the connection ends a body of unknown length
    (RFC 9112, section 6.3)."""

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._is_unknown = False  # the length of the body
        cycle.waiting_for_100_continue = False  # HTTP/1.0 has no status 100

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._is_unknown = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._is_unknown:
                self._cycle.chunked_encoding = False
        elif self._is_unknown:
            self._cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares it with the bytes sent
        await self._send(message)


class DisconnectProbe:
    """Tells a client that shut down its sending side and still reads from one that is gone, whose
    transport it aborts.

    TCP reports the end of the stream alike for both. Bytes that arrive at a client that is gone
    reset the connection, and its state then says so. `may_write`: no response has begun, so an
    interim response may be sent; else the response's own bytes have the same effect.
    """

    def __init__(self, transport: asyncio.Transport, *, may_write: bool) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        if may_write:
            transport.write(CONTINUE)
        self._timer = self._loop.call_later(FIRST_CHECK, self._check)

    @staticmethod
    def can_watch(transport: asyncio.Transport) -> bool:
        """Whether the connection is plain TCP on a system that reports its state."""
        connection = transport.get_extra_info("socket")
        is_tcp = connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and TCP_INFO is not None and transport.can_write_eof()

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        assert TCP_INFO is not None
        try:
            state = self._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, TCP_INFO, 1)[0]
        except (OSError, ValueError):  # the transport has closed it
            return
        if state == TCP_CLOSED:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(CHECK_INTERVAL, self._check)


async def _run_or_cut(cycle: Any, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Run the application; end the connection where it cuts its response."""
    try:
        await app(scope, receive, send)
        if cycle.transport.is_closing():  # a route may notice it before `connection_lost` is called
            cycle.disconnected = True
    except ResponseCutError:
        cycle.disconnected = True  # else uvicorn logs an error
        cycle.transport.close()


def raise_file_limit(max_connections: int) -> None:
    """Let this process open as many files as its connections need, as far as the system allows; a
    warning says where that is less."""
    required = max_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required:
        return
    allowed = required if hard == resource.RLIM_INFINITY else min(required, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed < required:
        log.warning("the system allows %d open files, too few for server.max_connections %d; raise ulimit -n", allowed, max_connections)
