"""The router's replicas: which of them answer, how many requests each has, and which one gets the
next one.

A replica is unhealthy after a failed connection or health check, until a check succeeds. Must not
know HTTP routes or prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from frame.core.parallel.replica_choice import ReplicaChooser

log = logging.getLogger(__name__)

PATIENCE = 2  # failed checks after which a replica is unhealthy


@dataclass(slots=True)
class Backend:
    """One server. `lost` is set while it is unhealthy: requests that wait for it give up."""

    url: str
    number: int
    is_healthy: bool = True
    outstanding: int = 0
    failed_checks: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Backends:
    """All replicas. `interval`: seconds between health checks, and of each."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient, interval: float) -> None:
        self.all = [Backend(url.rstrip("/"), number) for number, url in enumerate(urls)]
        self._client, self._interval = client, interval
        self._chooser = ReplicaChooser()

    @property
    def healthy(self) -> list[Backend]:
        return [backend for backend in self.all if backend.is_healthy]

    def choose(self, blocks: Sequence[int], tried: Collection[int] = ()) -> Backend | None:
        """The replica of a prompt with these hashes, among the healthy ones that were not tried."""
        loads = {backend.number: backend.outstanding for backend in self.healthy if backend.number not in tried}
        return self.all[self._chooser.choose_by_blocks(blocks, loads)] if loads else None

    def mark_lost(self, backend: Backend, reason: str) -> None:
        """The replica does not answer."""
        if backend.is_healthy:
            log.warning("replica %s is unhealthy: %s", backend.url, reason)
            self._chooser.forget_replica(backend.number)
        backend.is_healthy = False
        backend.lost.set()

    async def watch(self) -> None:
        """Check every replica, until cancelled."""
        while True:
            await asyncio.gather(*(self.check(backend) for backend in self.all))
            await asyncio.sleep(self._interval)

    async def check(self, backend: Backend, *, is_suspect: bool = False) -> None:
        """Ask a replica for its health once. `is_suspect`: a connection broke, or none was
        tried yet, so one failed check is enough."""
        reason = ""
        try:
            answer = await self._client.get(f"{backend.url}/health", timeout=max(1.0, self._interval))
            reason = "" if answer.status_code == 200 else f"/health answers {answer.status_code}"
        except (httpx.HTTPError, OSError) as error:
            reason = f"{type(error).__name__} {error}".strip()
        if not reason:
            if not backend.is_healthy:
                log.warning("replica %s is healthy again", backend.url)
                backend.lost = asyncio.Event()
            backend.is_healthy, backend.failed_checks = True, 0
            return
        backend.failed_checks += 1
        if is_suspect or backend.failed_checks >= PATIENCE:
            self.mark_lost(backend, reason)


@contextlib.contextmanager
def counted(backend: Backend) -> Iterator[None]:
    """Count a request of a replica inside a with block."""
    backend.outstanding += 1
    try:
        yield
    finally:
        backend.outstanding -= 1
