"""`RouterMetrics`: the router's counters and gauges, in the Prometheus text format. Used by the
proxy. Must not know a request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from frame.entrypoints.router.replicas import Backends


class RouterMetrics:
    """What one router counts. Outcomes: answered, refused (by every replica), retried (on another
    replica), lost (sent and not repeated), broken (the answer broke off), client_gone."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._registry = CollectorRegistry()
        self._requests = Counter("frame_router_requests", "Requests, by outcome.", ["outcome"], registry=self._registry)
        self._healthy = Gauge("frame_router_replica_healthy", "1: the replica answers.", ["replica"], registry=self._registry)
        self._outstanding = Gauge(
            "frame_router_replica_outstanding", "Requests of a replica that are not finished.", ["replica"], registry=self._registry
        )

    def count(self, outcome: str) -> None:
        """A request ended, or is sent again, for `retried`."""
        self._requests.labels(outcome).inc()

    def render(self) -> bytes:
        """All metrics as text."""
        for backend in self._backends.all:
            self._healthy.labels(backend.url).set(backend.is_healthy)
            self._outstanding.labels(backend.url).set(backend.outstanding)
        return generate_latest(self._registry)
