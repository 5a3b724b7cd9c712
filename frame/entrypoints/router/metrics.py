"""`RouterMetrics`: what a router counts, and the states of its replicas, for Prometheus.

Used by the proxy, which has one. Must not know HTTP.
"""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from frame.entrypoints.router.replicas import STATES, Backends


class RouterMetrics:
    """What one router counts. Outcomes: answered, refused (by every replica), retried (on another
    replica), lost (sent and not repeated), broken (the answer broke off), client_gone. Those at
    prefill servers: transferred, whole (the prompt has nothing to transfer, or the server refused
    it), lost (no prefill server is left), refused (by the decode server), unused (none answered).
    Moved streams: lost (with the replica), drained (with it), failed (no replica continues it)."""

    def __init__(self, backends: Backends, prefill: Backends | None = None) -> None:
        self._groups = [backends, *([prefill] if prefill is not None else [])]
        self._registry = CollectorRegistry()
        self._requests = Counter("frame_router_requests", "Requests, by outcome.", ["outcome"], registry=self._registry)
        self._prefills = Counter("frame_router_prefills", "Requests for prefill servers, by outcome.", ["outcome"], registry=self._registry)
        self._moves = Counter(
            "frame_router_moved_streams", "Streams that another replica continues, by cause.", ["cause"], registry=self._registry
        )
        self._healthy = Gauge("frame_router_replica_healthy", "1: the replica answers.", ["replica"], registry=self._registry)
        self._states = Gauge("frame_router_replicas", "Replicas, by state.", ["state"], registry=self._registry)
        self._suspended = Gauge(
            "frame_router_replica_suspended", "1: the replica gets no requests because it is slow.", ["replica"], registry=self._registry
        )
        self._outstanding = Gauge(
            "frame_router_replica_outstanding", "Requests of a replica that are not finished.", ["replica"], registry=self._registry
        )
        self._blocks = Gauge(
            "frame_router_replica_cached_blocks", "Blocks that a replica caches, as events tell.", ["replica"], registry=self._registry
        )
        self._desired = Gauge("frame_desired_replicas", "Replicas that the latency targets need.", registry=None)
        self._limit = Gauge("frame_router_replica_limit", "Requests of a replica within the targets; 0: not known.", registry=None)
        if backends.desired is not None:
            self._registry.register(self._desired)
            self._registry.register(self._limit)

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
        for gauge in (self._healthy, self._suspended, self._outstanding, self._blocks):  # of those that have left
            gauge.clear()
        replicas = [backend for group in self._groups for backend in group.all]
        if (desired := self._groups[0].desired) is not None:
            self._desired.set(desired.value)
            self._limit.set(0.0 if math.isinf(desired.limit) else desired.limit)
        for state in STATES:
            self._states.labels(state).set(sum(backend.state == state for backend in replicas))
        for backend in replicas:
            self._suspended.labels(backend.url).set(backend.is_suspended)
            self._healthy.labels(backend.url).set(backend.is_healthy)
            self._outstanding.labels(backend.url).set(backend.outstanding)
            if backend.events is not None and backend.events.is_live:
                self._blocks.labels(backend.url).set(sum(map(len, backend.events.indexes)))
        return generate_latest(self._registry)
