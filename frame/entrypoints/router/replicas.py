"""The router's replicas: which of them answer, how many requests each has, which one gets the next
one, and the metrics of all.

A replica is unhealthy after a failed connection or health check, until a check succeeds. Must not
know HTTP routes or prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from frame.core.interfaces.routing import RoutingRequest
from frame.entrypoints.handoff import FLEET
from frame.parallel.replica_choice import ReplicaChooser

log = logging.getLogger(__name__)

State = Literal["serving", "asleep", "draining", "lost"]
PATIENCE = 2  # failed checks after which a replica is unhealthy


@dataclass(slots=True)
class Backend:
    """One server. `lost` is set while it is lost: requests that wait for it give up. One that is
    asleep or drains gets no new requests, and keeps those that it has. `instance`: its process,
    `identity`: of what its tokens depend on, where it has a fleet key; else empty."""

    url: str
    number: int
    group: Backends
    state: State = "serving"
    instance: str = ""
    identity: str = ""
    outstanding: int = 0
    failed_checks: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_healthy(self) -> bool:
        """Whether it gets requests."""
        return self.state == "serving"

    @property
    def is_asleep(self) -> bool:
        return self.state == "asleep"


class Backends:
    """All replicas. `interval`: seconds between health checks, and of each."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient, interval: float, chooser: ReplicaChooser | None = None) -> None:
        self.all = [Backend(url.rstrip("/"), number, self) for number, url in enumerate(urls)]
        self._client, self._interval = client, interval
        self._chooser = chooser or ReplicaChooser(None)

    @property
    def healthy(self) -> list[Backend]:
        return [backend for backend in self.all if backend.is_healthy]

    def choose(self, request: RoutingRequest, tried: Collection[int] = ()) -> Backend | None:
        """The replica of a request, among the healthy ones that were not tried."""
        loads = {backend.number: backend.outstanding for backend in self.healthy if backend.number not in tried}
        return self.all[self._chooser.choose(request, loads)] if loads else None

    def mark_lost(self, backend: Backend, reason: str) -> None:
        """The replica does not answer."""
        if backend.is_healthy:
            log.warning("replica %s is unhealthy: %s", backend.url, reason)
            self._chooser.forget_replica(backend.number)
        backend.state = "lost"
        backend.lost.set()

    async def watch(self) -> None:
        """Check every replica, until cancelled."""
        while True:
            await asyncio.gather(*(self.check(backend) for backend in self.all))
            await asyncio.sleep(self._interval)

    async def check(self, backend: Backend, *, is_suspect: bool = False) -> None:
        """Ask a replica for its health once. `is_suspect`: a connection broke, or none was
        tried yet, so one failed check is enough."""
        reason, state = "", ""
        try:
            async with asyncio.timeout(max(1.0, self._interval)), self._client.stream("GET", f"{backend.url}/health") as reply:
                reason = "" if reply.status_code == 200 else f"/health answers {reply.status_code}"  # its body may not end
                state = reply.headers.get("x-frame-state", "")
                backend.instance, _, backend.identity = reply.headers.get(FLEET.decode(), "").partition(" ")
        except (httpx.HTTPError, OSError) as error:  # TimeoutError is an OSError
            reason = f"{type(error).__name__} {error}".strip()
        found: State | None = "serving" if not reason else "asleep" if state == "asleep" else "draining" if state == "draining" else None
        if found is not None:
            if backend.state == "lost":
                log.warning("replica %s is healthy again", backend.url)
                backend.lost = asyncio.Event()
            elif found == "draining" and backend.state != found:
                log.info("replica %s drains", backend.url)
            backend.state, backend.failed_checks = found, 0
            return
        backend.failed_checks += 1
        if is_suspect or backend.failed_checks >= PATIENCE:
            self.mark_lost(backend, reason)


@dataclass(slots=True)
class Place:
    """A request that counts as one of a replica."""

    backend: Backend

    def move(self, backend: Backend) -> None:
        """It is another replica's now."""
        self.backend.outstanding -= 1
        backend.outstanding += 1
        self.backend = backend


@contextlib.contextmanager
def counted(backend: Backend) -> Iterator[Place]:
    """Count a request of a replica inside a with block."""
    backend.outstanding += 1
    place = Place(backend)
    try:
        yield place
    finally:
        place.backend.outstanding -= 1


class RouterMetrics:
    """What one router counts. Outcomes: answered, refused (by every replica), retried (on another
    replica), lost (sent and not repeated), broken (the answer broke off), client_gone. Those at
    prefill servers: transferred, whole (the prompt has nothing to transfer, or the server refused
    it), lost (no prefill server is left). Moved streams: lost (with the replica), drained (with
    it), failed (no replica continues it)."""

    def __init__(self, backends: Backends, prefill: Backends | None = None) -> None:
        self._all = [*backends.all, *(prefill.all if prefill is not None else ())]
        self._registry = CollectorRegistry()
        self._requests = Counter("frame_router_requests", "Requests, by outcome.", ["outcome"], registry=self._registry)
        self._prefills = Counter("frame_router_prefills", "Requests for prefill servers, by outcome.", ["outcome"], registry=self._registry)
        self._moves = Counter(
            "frame_router_moved_streams", "Streams that another replica continues, by cause.", ["cause"], registry=self._registry
        )
        self._healthy = Gauge("frame_router_replica_healthy", "1: the replica answers.", ["replica"], registry=self._registry)
        self._outstanding = Gauge(
            "frame_router_replica_outstanding", "Requests of a replica that are not finished.", ["replica"], registry=self._registry
        )

    def count(self, outcome: str) -> None:
        """A request ended, or is sent again, for `retried`."""
        self._requests.labels(outcome).inc()

    def count_move(self, outcome: str) -> None:
        """A stream moves to another replica, or ends because it cannot."""
        self._moves.labels(outcome).inc()

    def count_prefill(self, outcome: str) -> None:
        """A request that may be divided goes on to a decode server."""
        self._prefills.labels(outcome).inc()

    def render(self) -> bytes:
        """All metrics as text."""
        for backend in self._all:
            self._healthy.labels(backend.url).set(backend.is_healthy)
            self._outstanding.labels(backend.url).set(backend.outstanding)
        return generate_latest(self._registry)
