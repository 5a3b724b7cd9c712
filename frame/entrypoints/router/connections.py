"""`open_client`: the HTTP client of a router, for connections to replicas.

A connection is closed instead of used again where bytes follow an answer: the next request would
get them as its answer. httpcore closes a kept connection whose socket is readable, but does not
look at what its parser holds. At each request it asks the system about all idle connections and
compares each with all others, which takes milliseconds for a hundred; here a request asks about the
one that it uses. Heads and trailers of responses are bounded as those of requests are, before they
are parsed: h11 bounds neither the number of headers nor that of informational responses. Must not
know requests or replicas.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import ssl
import sys
import time
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import h11
import httpcore
import httpx
from h11._receivebuffer import ReceiveBuffer  # no public name

from frame.entrypoints.http.protocol.connections import LARGEST_HEAD, MAX_HEADERS

CONNECT = 3.0  # seconds to reach a replica
IDLE = 30.0  # seconds that a connection to a replica is kept: less than a server keeps it
MAX_KEPT = 256  # idle connections
MAX_INFORMATIONAL = 16  # 1xx responses to one request
_BARE_LF = re.compile(rb"(?<!\r)\n")


class ResponseHeadError(httpx.RemoteProtocolError):
    """The head or the trailers of a response are too large or invalid. The message says how, after
    "sent"."""


class InformationalError(ResponseHeadError):
    """A replica sends 1xx responses and no final one."""


def open_client() -> httpx.AsyncClient:
    """A client that adds no header of its own but `Via` with a name of this client, and sends no
    cookie of one answer with another request. It waits for answers without a time limit."""
    if importlib.util.find_spec("sniffio") is None:
        # httpcore imports it at each request, and a failed import searches all of `sys.path`
        sys.modules.setdefault("sniffio", None)  # type: ignore[arg-type]
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    client = httpx.AsyncClient(transport=_Transport(), timeout=httpx.Timeout(None, connect=CONNECT), trust_env=False, cookies=no_cookies)
    for name in ("accept", "accept-encoding", "user-agent"):
        del client.headers[name]  # the client's own are passed on
    client.headers["via"] = f"1.1 frame-{secrets.token_hex(16)}"  # RFC 9110, section 7.6.3
    return client


class _Transport(httpx.AsyncHTTPTransport):
    def __init__(self) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        super().__init__(verify=context)
        self._pool = _Pool(context)


class _Pool(httpcore.AsyncConnectionPool):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context, max_connections=None, max_keepalive_connections=MAX_KEPT, keepalive_expiry=IDLE)
        self._context = context

    def _assign_requests_to_connections(self) -> list[httpcore.AsyncConnectionInterface]:
        """Overrides a private method, which httpcore calls when a request begins or ends. Returns
        the connections to close; a queued request gets an available connection or a new one."""
        closing, kept, num_idle = list[httpcore.AsyncConnectionInterface](), list[httpcore.AsyncConnectionInterface](), 0
        for connection in self._connections:
            if connection.is_idle():
                num_idle += 1
                if num_idle > MAX_KEPT or connection.has_expired():
                    closing.append(connection)
                    continue
            if not connection.is_closed():
                kept.append(connection)
        self._connections = kept
        queued = [request for request in self._requests if request.is_queued()]
        free = [connection for connection in kept if connection.is_available()] if queued else []
        for request in queued:
            origin = request.request.url.origin
            chosen = next((connection for connection in reversed(free) if connection.can_handle_request(origin)), None)
            if chosen is None:
                chosen = self.create_connection(origin)
                kept.append(chosen)
            else:
                free.remove(chosen)
            request.assign_to_connection(chosen)
        return closing

    def create_connection(self, origin: httpcore.Origin) -> httpcore.AsyncConnectionInterface:
        return _Connection(origin, self._context, IDLE)


class _Connection(httpcore.AsyncHTTPConnection):
    """Bounds heads of responses. Is closed where bytes follow the last answer."""

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        async with self._request_lock:
            if self._connection is None:
                try:
                    self._connection = _Http11(self._origin, await self._connect(request), IDLE)
                except BaseException:
                    self._connect_failed = True
                    raise
            opened: Any = self._connection
            if opened.is_idle() and (opened.has_expired() or opened._h11_state.trailing_data[0]):  # noqa: SLF001 - no public name
                await opened.aclose()
                raise httpcore.ConnectionNotAvailable  # the pool chooses another
        return await super().handle_async_request(request)

    def has_expired(self) -> bool:
        """Whether it has been idle for too long. `handle_async_request` sees whether the replica
        has closed it."""
        opened: Any = self._connection
        if opened is None:
            return self._connect_failed
        return opened._expire_at is not None and time.monotonic() > opened._expire_at  # noqa: SLF001 - no public name


class _Http11(httpcore.AsyncHTTP11Connection):
    def __init__(self, origin: httpcore.Origin, stream: httpcore.AsyncNetworkStream, expiry: float) -> None:
        super().__init__(origin, stream, expiry)
        self._heads = _HeadBuffer()
        self._h11_state._receive_buffer = self._heads  # noqa: SLF001 - no public name

    async def _receive_response_headers(self, request: httpcore.Request) -> Any:
        self._heads.start_response()
        return await super()._receive_response_headers(request)

    async def _receive_response_body(self, request: httpcore.Request) -> AsyncIterator[bytes]:
        """Overrides a private method: all data that has come is one part, and nothing is set up for
        a time limit of each read, as there is none."""
        state, stream = self._h11_state, self._network_stream._stream  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
        while True:
            data = bytearray()
            try:
                while isinstance(event := state.next_event(), h11.Data):
                    data += event.data
            except h11.RemoteProtocolError as error:
                if data:
                    yield bytes(data)
                raise httpcore.RemoteProtocolError(error) from error
            if data:
                yield bytes(data)
            if event is not h11.NEED_DATA:
                return
            try:
                received = await stream.receive(self.READ_NUM_BYTES)
            except Exception:  # noqa: BLE001 - the end or a loss, which httpcore's own way to read names
                received = await self._network_stream.read(self.READ_NUM_BYTES)
            state.receive_data(received)


class _HeadBuffer(ReceiveBuffer):
    """h11's buffer of received bytes. Heads and trailers leave it as lines, all other data as
    bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.start_response()

    def start_response(self) -> None:
        self._num_blocks = 0  # heads and trailers taken
        self._num_bytes = 0  # of these

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of the next head or trailers, without the empty one; None before they are
        complete. Raises ResponseHeadError, which h11, httpcore and httpx pass on."""
        data, start = self._data, self._multiple_lines_search
        end = 0 if data[:2] == b"\r\n" else data.find(b"\r\n\r\n", start)
        size = len(data) if end < 0 else end + 4 if end else 2
        if self._num_bytes + size > LARGEST_HEAD:
            raise ResponseHeadError(f"headers of more than {LARGEST_HEAD} bytes")
        if _BARE_LF.search(data, start, size):
            raise ResponseHeadError("a header line that does not end with CR LF")
        if end < 0:
            self._multiple_lines_search = max(0, size - 3)
            return None
        self._num_blocks += 1
        self._num_bytes += size
        if self._num_blocks > MAX_INFORMATIONAL + 2:  # and a head and trailers
            raise InformationalError(f"more than {MAX_INFORMATIONAL} informational (1xx) responses to one request")
        if data.count(b"\r\n", 0, end) > MAX_HEADERS:  # counts no CR LF of the last header, and that of the status line
            raise ResponseHeadError(f"more than {MAX_HEADERS} headers")
        head = self._extract(size)
        return head[:end].split(b"\r\n") if end else []
