"""`TlsListener`: accepts TCP connections and counts them from then on, also while their TLS
handshake lasts.

The event loop's own TLS server tells a protocol of a connection only after the handshake, so that
connections without one would be neither counted nor ended by the server's limits. Used by
`HttpServer`. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from frame.entrypoints.http.protocol.connections import ConnectionLimits

log = logging.getLogger(__name__)

BACKLOG = 2048
AT_ONCE = 100  # connections accepted in one turn of the loop
PAUSE = 1.0  # seconds without accepting when the process has no descriptor left


class TlsListener:
    """One listening socket, in the running loop. `connections` is the server's set: those before
    their handshake are in it too.

    `close` and `wait_closed` are as those of asyncio's servers, for uvicorn.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: set[Any],
        limits: ConnectionLimits,
        context: ssl.SSLContext,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._limits = limits
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more, and end what has no TLS yet."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
            for handshake in self._handshakes:
                handshake.cancel()

    async def wait_closed(self) -> None:
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory left: the socket would stay readable
                log.warning("connections are not accepted for %g s: %s", PAUSE, error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(PAUSE, self._resume)
                return
            if len(self._connections) >= self._limits.max_connections:
                connection.close()  # a sentence could be sent only after a handshake
                continue
            connection.setblocking(False)
            protocol = self._make_protocol()
            self._connections.add(protocol)
            handshake = self._loop.create_task(self._secure(connection, protocol))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _secure(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        """From here on the protocol takes itself out of `connections` when the connection ends."""
        seconds = self._limits.client_timeout
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=seconds)
        except BaseException as error:
            self._connections.discard(protocol)
            connection.close()
            if not isinstance(error, OSError):  # no TLS, or none in time; ssl.SSLError is an OSError
                raise
