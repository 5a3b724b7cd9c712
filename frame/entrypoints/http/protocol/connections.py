"""`GuardedProtocol`: uvicorn's HTTP connection with limits: number of connections, size and time of
a request's head, time in which a client reads nothing of a response.

Invalid HTTP and exceeded limits are answered in the API's error shape. `RequestContext` bounds
bodies. Must not depend on a route.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from frame.entrypoints.http.errors import RETRY_AFTER, ApiError
from frame.entrypoints.http.protocol.http10 import CloseDelimited
from frame.entrypoints.http.protocol.upgrade_refusal import UpgradeRefusingProtocol

log = logging.getLogger(__name__)

MOST_HEADERS = 128
LARGEST_HEAD = 64 * 1024  # bytes of request line and headers together
SEPARATORS = 4  # bytes of a header beside its name and value
LINGER = 1.0  # seconds that a refused client has to read the error
MOST_LINGERING = 128  # refused connections that are given this time
SPARE_FILES = 256 + MOST_LINGERING  # descriptors for everything but connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`client_timeout` in seconds: for a whole head, and for a client that does not read.
    `lingering`: refused connections that are not closed yet."""

    max_connections: int
    client_timeout: float
    lingering: set[asyncio.Protocol] = field(default_factory=set)


class GuardedProtocol(UpgradeRefusingProtocol):
    """One connection. At most one timer runs for its reading side (`_reading`) and one for its
    writing side (`_writing`)."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits
        self._is_head = True  # between two requests, or in the head of one
        self._has_begun = False  # a head has
        self._head_bytes = 0  # received of the head, or since the last bytes of the body: chunk extensions and trailers
        self._parsed_bytes = 0  # of them: in the URL and in complete headers
        self._num_headers = 0  # trailers too
        self._has_body = False  # bytes of a body came with the data at hand
        self._has_ended = False  # a request ended within the data at hand
        self._refusal: ApiError | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # the connection -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self._limits.max_connections
        if len(self.connections) > most:
            self._refuse(ApiError(503, f"{most} connections are open, all that server.max_connections allows; try again later"))
        else:
            self._await_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self.resume_writing()
        self._limits.lingering.discard(self)
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
        if self._refusal is not None:  # it is being closed
            return
        was_head, self._has_body, self._has_ended = self._is_head, False, False
        super().data_received(data)
        if self._refusal is not None or self.transport.is_closing():
            return
        if was_head == self._is_head and not self._has_body:
            new = len(data.rpartition(b"\r\n\r\n")[2]) if self._has_ended else len(data)  # pipelined requests: of the last one
            try:
                self._head_bytes = self._within_head(self._head_bytes + new)
            except ApiError as error:
                self._refuse(error)
                return
        is_answered = self.cycle is None or self.cycle.response_complete
        if is_answered and self._reading is None:  # part of a head, or the rest of a body that was not read
            self._await_reading()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or a refusal that was raised in the parser's callbacks."""
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request; send HTTP/1.1"))

    def on_message_begin(self) -> None:
        self._head_bytes = self._parsed_bytes = self._num_headers = 0
        self._is_head = self._has_begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed_bytes = self._within_head(self._parsed_bytes + len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after a chunked body. Trailers are dropped: they bring no
        credentials and change no framing."""
        self._parsed_bytes = self._within_head(self._parsed_bytes + len(name) + len(value) + SEPARATORS)
        self._num_headers += 1
        if self._num_headers > MOST_HEADERS:
            self._raise(f"the request has more than {MOST_HEADERS} headers; send fewer")
        if not self._is_head:
            return
        key = name.lower()
        if key == b"host" and any(known == key for known, _ in self.headers):
            self._raise("the request has two Host headers; send one", 400)  # a proxy in front may have read the other
        if key == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._raise("the request has a transfer-encoding other than chunked; send chunked or content-length", 400)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._head_bytes = self._parsed_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._is_head = self._has_begun = False
        self._stop_reading_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_head = self._has_ended = True
        self._stop_reading_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        is_idle = self._is_head and not self._has_begun
        if not is_idle and self.cycle.response_complete and self._reading is None:
            self._await_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] in ("0.9", "1.0"):
            cycle.keep_alive = False
            cycle.send = CloseDelimited(cycle)
        super()._start_asgi_task(cycle, app)

    # limits ---------------------------------------------------------------------------------------

    def _within_head(self, size: int) -> int:
        if size > LARGEST_HEAD:
            self._raise(f"the request line and headers are larger than {LARGEST_HEAD} bytes; send less")
        return size

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
        self._stop_reading_timer()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:  # in the midst of an answer there is no other
            self.transport.close()
            return
        if cycle is not None:  # the route that serves it receives http.disconnect
            cycle.disconnected = True
            cycle.message_event.set()
        body = error.body()
        retry = b"retry-after: %d\r\n" % RETRY_AFTER if error.status == 503 else b""
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + retry + b"\r\n" + body)
        if len(self._limits.lingering) >= MOST_LINGERING or not self.transport.can_write_eof():  # TLS has no half-closed state
            self.transport.close()
        else:  # to close with bytes unread would reset the connection, and the client might not see the answer
            self.connections.discard(self)
            self._limits.lingering.add(self)
            self.transport.write_eof()
            self._reading = self.loop.call_later(LINGER, self.transport.abort)


def raise_file_limit(max_connections: int) -> None:
    """Let this process open as many files as its connections need, as far as the system allows; a
    warning says where that is less."""
    wanted = max_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed < wanted:
        log.warning("the system allows %d open files, too few for server.max_connections %d; raise ulimit -n", allowed, max_connections)
