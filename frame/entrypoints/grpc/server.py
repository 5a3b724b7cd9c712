"""The gRPC server: port, keys, limits, health and reflection, in the main process's loop.

Every method but the health checks needs a key, where there are keys, as over HTTP.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from frame.core.errors import ConfigurationError
from frame.entrypoints.grpc.calls import Act, Entrance, headers_of
from frame.entrypoints.grpc.health import Health
from frame.entrypoints.grpc.pooling import Pooling
from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.service import Service
from frame.entrypoints.http.protocol.listening import address
from frame.entrypoints.http.services import Services
from frame.entrypoints.keys import KeyRing, load_keys
from frame.entrypoints.logs import report
from frame.entrypoints.tls import Certificate, load_certificate

HEALTH_EVERY = 0.2  # seconds between two looks at the server's health
CLOSE_TIMEOUT = 0.5  # seconds for last messages to leave
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")  # of methods, as grpcio names them
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class GrpcServer:
    """Raises ConfigurationError when the port is taken. Made and used in a running loop."""

    def __init__(self, services: Services, host: str, port: int) -> None:
        server = services.resolved.user.server
        self._services = services
        self.keys = load_keys(server)
        options = [
            ("grpc.so_reuseport", 0),  # two servers must not share a port unnoticed
            ("grpc.max_receive_message_length", server.max_body_bytes),
            ("grpc.max_metadata_size", 16 * 1024),
            ("grpc.max_concurrent_streams", server.max_connections),  # of one connection; whoever calls, and whatever
        ]
        self._server = grpc.aio.server(interceptors=[Door(self.keys, server.max_connections)], options=options)
        self._health = Health(("", SERVICE))
        self._watching: asyncio.Task[None] | None = None
        schema = Schema()
        self._server.add_generic_rpc_handlers((_handlers(services, schema, Entrance(services, self._tenant_of)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)
        self._certificate = load_certificate(server)
        self.address = _bind(self._server, host, port, None if self._certificate is None else self._credentials(self._certificate))

    def renew_certificate(self, certificate: Certificate) -> None:
        """Serve new connections under this one."""
        self._certificate = certificate

    def _credentials(self, first: Certificate) -> Any:
        """Under `_certificate`, which gRPC asks for at each handshake, in a thread of its own."""
        used = first

        def fetch() -> Any:
            nonlocal used
            if self._certificate is used or self._certificate is None:
                return None  # as before
            used = self._certificate
            return grpc.ssl_server_certificate_configuration([used.pems()])

        return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([first.pems()]), fetch)

    async def start(self) -> None:
        self._look()
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())
        report(f"gRPC on {self.address}")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(CLOSE_TIMEOUT)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_EVERY)
            self._look()

    def _look(self) -> None:
        self._health.set(self._services.ready_problem() is None)

    def _tenant_of(self, context: Any) -> str:
        """Of a call that `Door` has let in."""
        return "" if self.keys is None else self.keys.tenant(headers_of(context.invocation_metadata())) or ""


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls in that bring a key (`authorization: Bearer KEY` or `x-api-key`), where there are keys, and so many at once that are not
    health checks: these need no key and are bounded by themselves, so that strangers take no place. One of several keys has no more
    than half of the places."""

    def __init__(self, keys: KeyRing | None, most: int) -> None:
        self._keys = keys
        self._most = most
        self._running: Counter[str] = Counter()  # calls by tenant; as many entries as keys

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(f"/{HEALTH}/"):
            return handler
        tenant = "" if self._keys is None else self._keys.tenant(headers_of(details.invocation_metadata))
        if tenant is None:
            return grpc.stream_stream_rpc_method_handler(_refuse)  # for calls of any shape: it reads nothing
        shape = next(name for name in SHAPES if getattr(handler, name) is not None)
        return handler._replace(**{shape: self._counted(getattr(handler, shape), tenant)})

    def _counted(self, method: Any, tenant: str) -> Any:
        """The method, with a place for each call. grpcio tells by the kind of function how replies come: as it returns or yields."""

        async def take(context: Any) -> None:
            most_of_key = self._most if self._keys is None or len(self._keys) < 2 else max(1, self._most // 2)
            if self._running.total() >= self._most or self._running[tenant] >= most_of_key:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "as many calls run as server.max_connections allows; try later")
            self._running[tenant] += 1

        async def returning(request: Any, context: Any) -> Any:
            await take(context)
            try:
                return await method(request, context)
            finally:
                self._running[tenant] -= 1

        async def yielding(request: Any, context: Any) -> AsyncIterator[Any]:
            await take(context)
            try:
                async for reply in method(request, context):
                    yield reply
            finally:
                self._running[tenant] -= 1

        return yielding if inspect.isasyncgenfunction(method) else returning


async def _refuse(requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong; send the metadata authorization: Bearer KEY")


def _handlers(services: Services, schema: Schema, entrance: Entrance) -> Any:
    service, pooling = Service(services, schema), Pooling(services, schema)
    acts: dict[str, Act] = {
        "Generate": service.generate,
        "GenerateStream": service.generate_stream,
        "Embed": pooling.embed,
        "Rerank": pooling.rerank,
        "Score": pooling.score,
        "Classify": pooling.classify,
        "Moderate": pooling.moderate,
        "Abort": service.abort,
        "Tokenize": service.tokenize,
        "Detokenize": service.detokenize,
        "ServerInfo": service.server_info,
    }
    made = {}
    for name, act in acts.items():
        method = schema.methods[name]
        reads, writes = schema[method.input_type.name], schema[method.output_type.name].SerializeToString
        if method.client_streaming:
            made[name] = grpc.stream_stream_rpc_method_handler(entrance.each(act, reads), response_serializer=writes)
        elif method.server_streaming:
            made[name] = grpc.unary_stream_rpc_method_handler(entrance.one(name, act, reads), response_serializer=writes)
        else:
            made[name] = grpc.unary_unary_rpc_method_handler(entrance.one(name, act, reads), response_serializer=writes)
    return grpc.method_handlers_generic_handler(SERVICE, made)


def _bind(server: Any, host: str, port: int, credentials: Any) -> str:
    try:
        if credentials is None:
            bound = server.add_insecure_port(address(host, port))
        else:
            bound = server.add_secure_port(address(host, port), credentials)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigurationError(f"cannot listen on {address(host, port)} for gRPC; choose another --grpc-port")
    return address(host, bound)
