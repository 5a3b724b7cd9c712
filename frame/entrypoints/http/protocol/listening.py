"""`HttpServer`: uvicorn with this server's connection limits; `bound_port`: a port that is bound
before slow steps of the start.

Used by the listeners of the API, of operators and of the router. Must not depend on a route."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from frame.core.errors import ConfigurationError
from frame.entrypoints.http.protocol.connections import ConnectionLimits, GuardedProtocol
from frame.entrypoints.http.protocol.listener import Listener
from frame.entrypoints.tls import Certificate

KEEP_ALIVE = 75  # seconds that a connection may wait for its next request


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
        made: asyncio.Protocol = config.http_protocol_class(config=config, server_state=self.server_state, app_state=self.lifespan.state)
        return made


def bound_port(host: str, port: int, flags: str) -> socket.socket:
    """A TCP socket on the address, not listening yet. Raises ConfigurationError that names the
    `flags` that choose another."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
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
