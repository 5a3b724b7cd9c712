"""`StartingServer` responds on the server's socket while the model loads: `/health/live` and
`/livez` 200, everything else 503.

It uses the server's HTTP and TLS with an application of its own, in a thread with an event loop.
Connections that it does not accept stay in the socket's queue for the server. Must not depend on
the engine or on keys.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from frame.entrypoints.http.errors import ApiError, DisconnectedError
from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import BACKLOG, HttpServer
from frame.entrypoints.http.protocol.routing import PathIndex, decode_path
from frame.entrypoints.http.request_context import JSON, Receive, RequestContext, Scope, Send
from frame.entrypoints.tls import Certificate

PATIENCE = 5.0  # seconds for a handshake, a request's head, its body, and for responses that are written when the phase ends
RETRY_AFTER = 2  # seconds
CLOSE = (b"connection", b"close")  # so that the next request reaches the server

_router: PathIndex[None] = PathIndex([("/health/live", ("GET",), None), ("/livez", ("GET",), None)])


class StartingServer:
    """A context manager: inside it, this server accepts the connections to the socket."""

    def __init__(self, listener: socket.socket, max_connections: int, certificate: Certificate | None = None) -> None:
        self._listener = listener
        self._http = HttpServer(_reply, ConnectionLimits(max_connections, PATIENCE), certificate)
        self._http.config.timeout_graceful_shutdown = int(PATIENCE)
        self._loop = asyncio.new_event_loop()
        self._is_up, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="starting", daemon=True)

    def __enter__(self) -> Self:
        self._listener.listen(BACKLOG)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Accept no more connections. The thread responds to requests that were accepted."""
        self._is_up.wait()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._close)
            self._is_closed.wait()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._is_up.set()
            self._is_closed.set()

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._http.serve([self._listener.dup()]))
        await self._http.listening.wait()
        self._is_up.set()
        await serving

    def _close(self) -> None:
        for server in self._http.servers:
            server.close()
        self._http.should_exit = True
        self._is_closed.set()


async def _reply(scope: Scope, receive: Receive, send: Send) -> None:
    call = RequestContext(scope, receive, send, 0)
    with suppress(DisconnectedError):
        try:
            async with asyncio.timeout(PATIENCE):
                while (await receive()).get("more_body"):  # to close with bytes unread would reset the connection
                    pass
            match = _router.find(decode_path(scope["raw_path"]))
            if match is None or scope["method"] not in match.methods():
                raise ApiError(503, "the server is starting; the model is not loaded yet", retry_after=RETRY_AFTER)
            await call.respond(b"{}", headers=(JSON, CLOSE))
        except (ApiError, TimeoutError) as error:
            refusal = error if isinstance(error, ApiError) else ApiError(408, f"the body did not come within {PATIENCE:g} s; send it again")
            refusal.headers = (*refusal.headers, CLOSE)
            await call.fail(refusal)
