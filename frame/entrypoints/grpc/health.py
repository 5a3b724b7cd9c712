"""`Health`: the service grpc.health.v1.Health. It needs no key, so watches are limited in number
and in time. Used by the gRPC server, which sets the status. Must not know another service or a
key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

MAX_WATCHES = 256
MAX_WATCHES_PER_CONNECTION = 8
MAX_WATCH_TIME = 3600.0  # seconds, after which a watch ends with OK; the client may start another
WRITE_TIMEOUT = 10.0  # seconds in which the client must read a status


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """`names` are the services whose status is the server's."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._is_serving = False
        self._changed = asyncio.Event()  # set, and replaced, on each change
        self._watches: Counter[str] = Counter()  # by connection

    def set_status(self, is_serving: bool) -> None:
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - grpc's name
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:100]!r}")
        return self._status(request.service)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - grpc's name
        peer = context.peer()
        if self._watches[peer] >= MAX_WATCHES_PER_CONNECTION or self._watches.total() >= MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"a connection may have {MAX_WATCHES_PER_CONNECTION} watches, and all together {MAX_WATCHES}; end one, or use Check",
            )
        with self._counted(peer), suppress(TimeoutError):
            async with asyncio.timeout(MAX_WATCH_TIME):
                while True:
                    changed = self._changed
                    async with asyncio.timeout(WRITE_TIMEOUT):
                        await context.write(self._status(request.service))
                    await changed.wait()

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        self._watches[peer] += 1
        try:
            yield
        finally:
            self._watches[peer] -= 1
            if not self._watches[peer]:
                del self._watches[peer]

    def _status(self, service: str) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if service not in self._names:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._is_serving else kinds.NOT_SERVING)
