"""`Health`: the service grpc.health.v1.Health. It needs no key, so its calls are limited in number
and in time. Used by the gRPC server, which sets the status. Must not know another service or a
key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from frame.entrypoints.grpc.calls import abort
from frame.entrypoints.grpc.reading import OpenReader
from frame.entrypoints.http.errors import ApiError

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_WATCHES = 256
MAX_WATCHES_PER_CONNECTION = 8
MAX_CHECKS_PER_CONNECTION = 32
MAX_WATCH_TIME = 3600.0  # seconds, after which a watch ends with OK; the client may start another
WRITE_TIMEOUT = 10.0  # seconds in which the client must read a status


class Health:
    """`names` are the services whose status is the server's."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._is_serving = False
        self._changed = asyncio.Event()  # set, and replaced, on each change
        self._watches: Counter[str] = Counter()  # by connection
        self._checks: Counter[str] = Counter()  # by connection
        self._reader = OpenReader()

    def build_handlers(self) -> Any:
        """The handlers of both methods, which read their message themselves."""
        writes = health_pb2.HealthCheckResponse.SerializeToString
        acts = {"Check": self._check, "Watch": self._watch}
        handlers = {name: grpc.stream_stream_rpc_method_handler(act, response_serializer=writes) for name, act in acts.items()}
        return grpc.method_handlers_generic_handler(NAME, handlers)

    def set_status(self, is_serving: bool) -> None:
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def _check(self, _: Any, context: Any) -> None:
        peer = context.peer()
        if self._checks[peer] >= MAX_CHECKS_PER_CONNECTION:
            await abort(context, ApiError(429, f"a connection may have {MAX_CHECKS_PER_CONNECTION} health checks at once"))
        with _counted(self._checks, peer):
            service = await self._read(context)
            if service not in self._names:
                await abort(context, ApiError(404, f"there is no service {service[:100]!r}"))
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_TIMEOUT):
                    await context.write(self._status(service))

    async def _watch(self, _: Any, context: Any) -> None:
        peer = context.peer()
        if self._watches[peer] >= MAX_WATCHES_PER_CONNECTION or self._watches.total() >= MAX_WATCHES:
            sentence = f"a connection may have {MAX_WATCHES_PER_CONNECTION} watches, and all together {MAX_WATCHES}"
            await abort(context, ApiError(429, f"{sentence}; end one, or use Check"))
        with _counted(self._watches, peer), suppress(TimeoutError):
            service = await self._read(context)
            async with asyncio.timeout(MAX_WATCH_TIME):
                while True:
                    changed = self._changed
                    async with asyncio.timeout(WRITE_TIMEOUT):
                        await context.write(self._status(service))
                    await changed.wait()

    async def _read(self, context: Any) -> str:
        """The service that the call asks for."""
        try:
            request = await self._reader.read(context, health_pb2.HealthCheckRequest)
        except ApiError as error:
            await abort(context, error)
            raise  # abort has raised
        return str(request.service)

    def _status(self, service: str) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if service not in self._names:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._is_serving else kinds.NOT_SERVING)


@contextmanager
def _counted(calls: Counter[str], peer: str) -> Iterator[None]:
    calls[peer] += 1
    try:
        yield
    finally:
        calls[peer] -= 1
        if not calls[peer]:
            del calls[peer]
