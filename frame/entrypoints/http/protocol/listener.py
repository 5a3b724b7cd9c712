"""`Listener`: accepts the connections of one socket, a few in each turn of the event loop, with or
without TLS.

The event loop's own server accepts all that wait in one turn, which takes 0.1 ms for each, and
tells a protocol of a TLS connection only after the handshake, so that connections without one would
be neither counted nor ended by the server's limits. Used by `HttpServer`. Must not know HTTP.
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
MAX_ACCEPTED = 512  # connections accepted in one turn of the loop: those that have left cost 10 us
MAX_OPENED, MAX_HANDSHAKES = 16, 3  # of them that are served; over TLS, where each costs a signature
PAUSE = 1.0  # seconds without accepting when the process has no descriptor left


class Listener:
    """One listening socket, in the running loop. `connections` is the server's set: those before
    their TLS handshake are in it too. `context`: None: without TLS.

    `close` and `wait_closed` are as those of asyncio's servers, for uvicorn.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: set[Any],
        limits: ConnectionLimits,
        context: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._limits = limits
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
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
            if self._context is not None:
                for handshake in self._opening:
                    handshake.cancel()

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        num_left = MAX_OPENED if self._context is None else MAX_HANDSHAKES
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory left: the socket would stay readable
                log.warning("connections are not accepted for %g s: %s", PAUSE, error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(PAUSE, self._resume)
                return
            connection.setblocking(False)
            if _has_ended(connection) or not self._has_place():
                connection.close()  # over TLS, a sentence could be sent only after a handshake
                continue
            self._open(connection)
            num_left -= 1
            if not num_left:
                return

    def _has_place(self) -> bool:
        """Whether a connection over TLS may begin its handshake."""
        if self._context is None or len(self._connections) < self._limits.max_connections:
            return True
        return self._limits.close_longest_idle(self._loop.time())

    def _open(self, connection: socket.socket) -> None:
        protocol = self._make_protocol()
        if self._context is not None:
            self._connections.add(protocol)
        opening = self._loop.create_task(self._connect(connection, protocol))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        """From here on the protocol takes itself out of `connections` when the connection ends."""
        seconds = None if self._context is None else self._limits.client_timeout
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=seconds)
        except BaseException as error:
            self._connections.discard(protocol)
            connection.close()
            if not isinstance(error, OSError):  # no TLS, or none in time; ssl.SSLError is an OSError
                raise


def _has_ended(connection: socket.socket) -> bool:
    """Whether the client closed the connection before it sent anything."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
