"""The listener for operators' routes: a port or a Unix socket of its own, served in the main process's loop. Knows no route.

Its sockets are taken before anything slow, so that what is taken already is an error at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from frame.core.config import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.http.connections import ConnectionLimits, GuardedProtocol
from frame.entrypoints.logs import report

CONNECTIONS = 256  # at once
SOCKET_MODE = 0o600
CLOSE_TIMEOUT = 2.0  # seconds


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class AdminListener:
    """`sockets` is empty where no listener is configured; then `start` and `stop` do nothing."""

    def __init__(self, server: ServerSection) -> None:
        self._patience = server.client_timeout
        self._path = None if server.admin_socket is None else Path(server.admin_socket)
        self.sockets: list[socket.socket] = []
        self._http: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            if server.admin_port is not None:
                self.sockets.append(_port(server.admin_host, server.admin_port))
            if self._path is not None:
                self.sockets.append(_unix(self._path))
        except BaseException:
            self.close()
            raise

    def start(self, app: Any) -> None:
        """Serve, in the running loop."""
        if not self.sockets:
            return
        protocol: Any = partial(GuardedProtocol, limits=ConnectionLimits(CONNECTIONS, self._patience))
        config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, access_log=False, server_header=False, ws="none")
        self._http = _Uvicorn(config)
        self._task = asyncio.get_running_loop().create_task(self._http.serve(self.sockets))
        for listener in self.sockets:
            name = listener.getsockname()
            report(f"admin routes on {name if isinstance(name, str) else f'http://{name[0]}:{name[1]}'}")

    async def stop(self) -> None:
        if self._http is not None and self._task is not None:
            self._http.should_exit = self._http.force_exit = True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._task, CLOSE_TIMEOUT)

    def close(self) -> None:
        """Give the sockets back, and remove the file of one."""
        has_file = any(listener.family == socket.AF_UNIX for listener in self.sockets)
        for listener in self.sockets:
            listener.close()
        if self._path is not None and has_file:
            self._path.unlink(missing_ok=True)


def _port(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --admin-port") from error
    return listener


def _unix(path: Path) -> socket.socket:
    if path.is_socket() and not _is_served(path):
        path.unlink()  # left behind by a server that was killed
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(SOCKET_MODE)  # nobody can connect before `listen`
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
