"""`HttpServer`: uvicorn's server over sockets that are bound before. `AdminListener`: the listener
for operators' routes, a port or a Unix socket of its own, served in the main process's event loop.

`Listener` accepts the connections of one socket, a few in each turn of the event loop. The event
loop's own server accepts all that wait in one turn, which takes 0.1 ms for each, and tells a
protocol of a TLS connection only after the handshake, so that connections without one would be
neither counted nor ended by the server's limits. Must not depend on a route.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.http.protocol.connections import ConnectionLimits, GuardedProtocol
from frame.entrypoints.logs import report
from frame.entrypoints.tls import Certificate, load_certificate

log = logging.getLogger(__name__)

BACKLOG = 2048
MAX_ACCEPTED = 512  # connections accepted in one turn of the loop: those that have left cost 10 us
MAX_OPENED, MAX_HANDSHAKES = 16, 3  # of them that are served; over TLS, where each costs a signature
PAUSE = 1.0  # seconds without accepting when the process has no descriptor left
KEEP_ALIVE = 75  # seconds that a connection may wait for its next request
CONNECTIONS = 256  # of operators, at once
SOCKET_MODE = 0o600  # of the operators' Unix socket
CLOSE_TIMEOUT = 2.0  # seconds in which the operators' listener ends


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
        return self._limits.close_idlest(self._loop.time())

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


class HttpServer(uvicorn.Server):
    """Uvicorn without its own signal handlers, which the process has. `listening` is set once it
    accepts connections."""

    def __init__(self, app: Any, limits: ConnectionLimits, certificate: Certificate | None = None) -> None:
        protocol: Any = partial(GuardedProtocol, limits=limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                ws="none",
            )
        )
        self._limits = limits
        self._context = None if certificate is None else certificate.context()
        self.listening = asyncio.Event()

    def renew_certificate(self, certificate: Certificate) -> None:
        """Use this certificate for new connections, where this server uses TLS."""
        if self._context is not None:
            self._context.load_cert_chain(certificate.chain, certificate.key)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        connections = self.server_state.connections
        self.servers += [Listener(each, self._protocol, connections, self._limits, self._context) for each in sockets or []]  # type: ignore[misc]
        self.listening.set()

    def _protocol(self) -> asyncio.Protocol:
        config: Any = self.config
        states = {"server_state": self.server_state, "app_state": self.lifespan.state}
        protocol: asyncio.Protocol = config.http_protocol_class(config=config, **states)
        return protocol


def bound_port(host: str, port: int, flags: str) -> socket.socket:
    """A TCP socket on the address, not listening yet. Raises ConfigurationError that names the
    `flags` that choose another."""
    # asyncio sets TCP_NODELAY, which sends small pieces at once, only where the protocol is named
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {address(host, port)} ({error.strerror}); choose another with {flags}") from error
    return listener


def address(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class AdminListener:
    """`sockets` is empty where no listener is configured; then `start` and `stop` do nothing."""

    def __init__(self, server: ServerSection) -> None:
        self._patience = server.client_timeout
        self._path = None if server.admin_socket is None else Path(server.admin_socket)
        self.sockets: list[socket.socket] = []
        self._certificate = load_certificate(server)
        self._running: list[tuple[HttpServer, asyncio.Task[None]]] = []
        try:
            if server.admin_port is not None:
                self.sockets.append(bound_port(server.admin_host, server.admin_port, "--admin-port"))
            if self._path is not None:
                self.sockets.append(_unix(self._path))
        except BaseException:
            self.close()
            raise

    def start(self, app: Any) -> None:
        """Serve, in the running loop."""
        limits, loop = ConnectionLimits(CONNECTIONS, self._patience, bound="the admin listener takes"), asyncio.get_running_loop()
        for listener in self.sockets:
            certificate = None if listener.family == socket.AF_UNIX else self._certificate
            http = HttpServer(app, limits, certificate)
            self._running.append((http, loop.create_task(http.serve([listener]))))
            listener.listen()  # before the address is reported: the task has not run yet
            name, scheme = listener.getsockname(), "http" if certificate is None else "https"
            report(f"admin routes on {name if isinstance(name, str) else f'{scheme}://{address(*name[:2])}'}")

    @property
    def running(self) -> list[HttpServer]:
        return [http for http, _ in self._running]

    async def stop(self) -> None:
        for http, _ in self._running:
            http.should_exit = http.force_exit = True
        if self._running:
            await asyncio.wait([task for _, task in self._running], timeout=CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close the sockets, and remove the file of the Unix socket."""
        has_file = any(listener.family == socket.AF_UNIX for listener in self.sockets)
        for listener in self.sockets:
            listener.close()
        if self._path is not None and has_file:
            self._path.unlink(missing_ok=True)


def _unix(path: Path) -> socket.socket:
    if path.is_socket() and not _is_served(path):
        path.unlink()  # left behind by a server that was killed
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(SOCKET_MODE)  # before `listen`, so that no client connects with other rights
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {path} ({error.strerror or error}); choose another --admin-socket") from error
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
