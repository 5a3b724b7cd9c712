"""Runs the router: one asyncio loop, uvicorn in front, httpx behind, health checks beside. Used by
`frame router`. Imports no torch. Must not know a routing policy by name."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from frame.core.errors import ConfigError
from frame.entrypoints.handoff import FleetKey
from frame.entrypoints.http.protocol.connections import ConnectionLimits, raise_file_limit
from frame.entrypoints.http.protocol.listening import HttpServer, address
from frame.entrypoints.keys import AdminKey
from frame.entrypoints.logs import report
from frame.entrypoints.processes.start_signals import StartSignals
from frame.entrypoints.router.admin import AdminApp
from frame.entrypoints.router.cached_prefixes import CachedPrefixes
from frame.entrypoints.router.connections import open_client
from frame.entrypoints.router.discovery import Source, watch_sources
from frame.entrypoints.router.proxy import PREFILL_TIMEOUT, Proxy
from frame.entrypoints.router.replicas import Backends
from frame.entrypoints.router.scaling import DesiredReplicas, ScalingTargets
from frame.entrypoints.tls import Certificate
from frame.interfaces.routing import RoutingCapabilities, RoutingContext, RoutingPolicy
from frame.kv_events.subscriber import EventReader
from frame.parallel.replica_choice import ReplicaChooser
from frame.plugins.loader import load_registry

HEAD = 30.0  # seconds that a client has for a request's head, and to read
MAX_ADMIN_CONNECTIONS = 32
DRAIN = 30.0  # seconds that requests have to finish after a signal
END_TIME = 2.0  # seconds in which those that are ended then send their last bytes


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`urls`: of the replicas, or of decode servers. `health_interval`: seconds. `max_body`: bytes
    of a request. `prefill_urls`: of the servers that begin what decode servers continue. `key`: of
    the fleet; None: streams do not move. `sources`: of replicas that come and go. `certificate`:
    of the router's own address; None: without TLS. `targets`: that the number of replicas is
    computed for; None: it is not. `prefill_timeout`: seconds that prefill servers have."""

    urls: tuple[str, ...]
    health_interval: float
    max_body: int
    max_connections: int
    prefill_urls: tuple[str, ...] = ()
    key: FleetKey | None = None
    sources: tuple[str, ...] = ()
    certificate: Certificate | None = None
    targets: ScalingTargets | None = None
    prefill_timeout: float = PREFILL_TIMEOUT


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The routing policy of the command line; a call makes a new one. `reads_caches`: it keeps
    prefixes together, so that it needs to know what replicas have cached."""

    make: Callable[[], RoutingPolicy]
    reads_caches: bool

    def __call__(self) -> RoutingPolicy:
        return self.make()


def load_policy(name: str | None, options: Sequence[str]) -> PolicyChoice:
    """The routing policy of this name; None: the best-ranked one. `options`: each
    KEY=VALUE, its value in JSON or a plain string. Raises ConfigError or PluginError."""
    values: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not key or not equals:
            raise ConfigError(f"--policy-option is {option!r}; write KEY=VALUE")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    registry = load_registry()
    best = max((each for each in registry.records("routing_policy") if not each.problems), key=lambda each: each.rank)
    record = best if name is None else registry.get("routing_policy", name)
    target, checked = registry.load(record), registry.options(record, values)
    reads_caches = isinstance(record.capabilities, RoutingCapabilities) and record.capabilities.keeps_prefixes
    return PolicyChoice(lambda: target(RoutingContext(secrets.randbits(32)), checked), reads_caches)


async def route(
    settings: RouterSettings,
    policy: PolicyChoice,
    listener: socket.socket,
    signals: StartSignals,
    admin: tuple[socket.socket, AdminKey] | None = None,
) -> None:
    """Route requests until SIGINT or SIGTERM; a second signal does not wait for those that run.
    `signals`: of the start, held. `admin`: the listener of operators and its key."""
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    signals.forward(on_signal)
    raise_file_limit(2 * settings.max_connections)
    async with open_client() as client:
        reader = EventReader()
        prefixes = CachedPrefixes(reader) if settings.key is not None and policy.reads_caches else None
        backends = Backends(settings.urls, client, settings.health_interval, ReplicaChooser(policy()), prefixes)
        prefill = Backends(settings.prefill_urls, client, settings.health_interval, ReplicaChooser(policy()), prefixes)
        backends.desired = None if settings.targets is None else DesiredReplicas(settings.targets)
        sources = [Source(value) for value in settings.sources]
        named = {source.value: await source.read() or [] for source in sources}
        for value, urls in named.items():
            backends.update(value, urls)
        everything = [*backends.all, *prefill.all]
        await asyncio.gather(*(backend.group.check(backend, is_suspect=True) for backend in everything))
        limits = ConnectionLimits(settings.max_connections, HEAD, bound="--max-connections allows")
        proxy = Proxy(backends, client, settings.max_body, HEAD, prefill if prefill.all else None, settings.key)
        proxy.prefill_timeout = settings.prefill_timeout
        server = HttpServer(proxy, limits, settings.certificate)
        serving = asyncio.create_task(server.serve([listener]))
        discovering = watch_sources(sources, settings.health_interval, backends.update, named)
        watching = asyncio.gather(backends.watch(), prefill.watch(), discovering)
        if admin is not None:
            few = ConnectionLimits(MAX_ADMIN_CONNECTIONS, HEAD, bound="the admin listener takes")
            operators = HttpServer(AdminApp(backends, admin[1]), few)
            managing = asyncio.create_task(operators.serve([admin[0]]))
            await operators.listening.wait()
            report(f"admin routes on http://{address(*admin[0].getsockname()[:2])}")
        await server.listening.wait()
        gc.collect()
        gc.freeze()  # later collections, which hold the event loop, skip the objects of the start
        what = "decode servers" if prefill.all else "replicas"
        more = f", {len(prefill.healthy)} of {len(prefill.all)} prefill servers healthy" if prefill.all else ""
        place = address(*listener.getsockname()[:2])
        scheme = "http" if settings.certificate is None else "https"
        report(f"ready on {scheme}://{place}, {len(backends.healthy)} of {len(backends.all)} {what} healthy{more}")
        await stop.wait()
        for each in server.servers:
            each.close()  # no more connections
        await _wait_idle((backends, prefill), DRAIN, now)
        watching.cancel()
        reader.close()
        await asyncio.gather(watching, return_exceptions=True)
        for group in (backends, prefill):
            group.close("the router is shutting down")
        await _wait_idle((backends, prefill), END_TIME)
        if admin is not None:
            operators.should_exit = operators.force_exit = True
            await asyncio.wait([managing], timeout=END_TIME)
        server.should_exit = server.force_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, END_TIME)


async def _wait_idle(groups: Sequence[Backends], seconds: float, now: asyncio.Event | None = None) -> None:
    """Wait until no request runs, for so long at most, or until `now`."""
    deadline = time.monotonic() + seconds
    while any(each.outstanding for group in groups for each in group.all) and time.monotonic() < deadline:
        if now is not None and now.is_set():
            return
        await asyncio.sleep(0.05)
