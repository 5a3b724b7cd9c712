"""`AdminListener`: the listener for operators' routes, a port or a Unix socket of its own, served
in the main process's event loop.

The port uses TLS where the API does; the Unix socket never. Its sockets are bound before slow steps
of the start, so that an address in use is an error at once. Must not depend on a route.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from frame.config.schema import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import HttpServer, address, bound_port
from frame.entrypoints.logs import report
from frame.entrypoints.tls import load_certificate

CONNECTIONS = 256  # at once
SOCKET_MODE = 0o600
CLOSE_TIMEOUT = 2.0  # seconds


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
