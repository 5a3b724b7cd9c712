"""Runs the router: one asyncio loop, uvicorn in front, httpx behind, health checks beside. Used by
`frame router`. Imports no torch. Must not know how replicas are chosen."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from frame.core.errors import ConfigError
from frame.entrypoints.http.protocol.connections import ConnectionLimits, raise_file_limit
from frame.entrypoints.http.protocol.listening import HttpServer, address
from frame.entrypoints.logs import report
from frame.entrypoints.processes.start_signals import StartSignals
from frame.entrypoints.router.connections import open_client
from frame.entrypoints.router.proxy import Proxy
from frame.entrypoints.router.replicas import Backends

HEAD = 30.0  # seconds that a client has for a request's head, and to read
DRAIN = 30.0  # seconds that requests have to finish after a signal
_HOST = re.compile(r"[\w.:-]+")


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`urls`: of the replicas. `health_interval`: seconds. `max_body`: bytes of a request."""

    urls: tuple[str, ...]
    health_interval: float
    max_body: int
    max_connections: int


def check_url(url: str) -> str:
    """The address of a replica. Raises ConfigError unless it is http(s)://host[:port]."""
    address = urlsplit(url)
    try:
        is_valid = address.scheme in ("http", "https") and address.path in ("", "/") and not address.query
        is_valid = is_valid and bool(_HOST.fullmatch(address.hostname or ""))
        _ = address.port
    except ValueError:
        is_valid = False
    if address.username is not None:
        raise ConfigError("--replica has a user name, which the router does not send; write http://HOST:PORT or https://HOST:PORT")
    if not is_valid:
        raise ConfigError(f"--replica is {url!r}; write http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


async def route(settings: RouterSettings, listener: socket.socket, signals: StartSignals) -> None:
    """Route requests until SIGINT or SIGTERM; a second signal does not wait for those that run.
    `signals`: of the start, held."""
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    signals.forward(on_signal)
    raise_file_limit(2 * settings.max_connections)
    async with open_client() as client:
        backends = Backends(settings.urls, client, settings.health_interval)
        await asyncio.gather(*(backends.check(backend, is_suspect=True) for backend in backends.all))
        limits = ConnectionLimits(settings.max_connections, HEAD, bound="--max-connections allows")
        server = HttpServer(Proxy(backends, client, settings.max_body, HEAD), limits)
        serving = asyncio.create_task(server.serve([listener]))
        watching = asyncio.create_task(backends.watch())
        await server.listening.wait()
        gc.collect()
        gc.freeze()  # later collections, which hold the event loop, skip the objects of the start
        report(f"ready on http://{address(*listener.getsockname()[:2])}, {len(backends.healthy)} of {len(backends.all)} replicas healthy")
        await stop.wait()
        for each in server.servers:
            each.close()  # no more connections
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN):
                while any(backend.outstanding for backend in backends.all) and not now.is_set():  # noqa: ASYNC110 - two conditions
                    await asyncio.sleep(0.05)
        watching.cancel()
        server.should_exit = server.force_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, 2.0)
