"""The gRPC server: port, API keys, limits, health and reflection. It runs in the event loop of the
main process.

Every method except the health checks needs a key where keys are configured, as over HTTP.
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
from frame.entrypoints.grpc.calls import CallHandlers, Method, headers_of
from frame.entrypoints.grpc.health import Health
from frame.entrypoints.grpc.pooling import Pooling
from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.service import Service
from frame.entrypoints.http.protocol.listening import address
from frame.entrypoints.http.services import Services
from frame.entrypoints.keys import KeyRing, load_keys
from frame.entrypoints.logs import report
from frame.entrypoints.tls import Certificate, load_certificate

HEALTH_INTERVAL = 0.2  # seconds between updates of the health status
CLOSE_TIMEOUT = 0.5  # seconds in which running calls may send their last messages
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")  # grpcio's names of method kinds
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class GrpcServer:
    """Made and used in a running event loop. Raises ConfigurationError."""

    def __init__(self, services: Services, host: str, port: int) -> None:
        server = services.resolved.user.server
        self._services = services
        self.keys = load_keys(server)
        options = [
            ("grpc.so_reuseport", 0),  # or two servers could listen on one port unnoticed
            ("grpc.max_receive_message_length", server.max_body_bytes),
            ("grpc.max_metadata_size", 16 * 1024),
            ("grpc.max_concurrent_streams", server.max_connections),  # per connection, health checks included
        ]
        self._server = grpc.aio.server(interceptors=[AccessInterceptor(self.keys, server.max_connections)], options=options)
        self._health = Health(("", SERVICE))
        self._watching: asyncio.Task[None] | None = None
        schema = Schema()
        self._server.add_generic_rpc_handlers((_handlers(services, schema, CallHandlers(services, self._tenant_of)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)
        self._certificate = load_certificate(server)
        self.address = _bind(self._server, host, port, None if self._certificate is None else self._credentials(self._certificate))

    def renew_certificate(self, certificate: Certificate) -> None:
        """Use this certificate for new connections."""
        self._certificate = certificate

    def _credentials(self, first: Certificate) -> Any:
        """Credentials that follow `_certificate`: each handshake calls `fetch` in a thread."""
        used = first

        def fetch() -> Any:
            nonlocal used
            if self._certificate is used or self._certificate is None:
                return None  # unchanged
            used = self._certificate
            return grpc.ssl_server_certificate_configuration([used.read_pems()])

        return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([first.read_pems()]), fetch)

    async def start(self) -> None:
        self._update_health()
        await self._server.start()
        self._watching = asyncio.create_task(self._watch_health())
        report(f"gRPC on {self.address}")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(CLOSE_TIMEOUT)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            self._update_health()

    def _update_health(self) -> None:
        self._health.set_status(self._services.ready_problem() is None)

    def _tenant_of(self, context: Any) -> str:
        """The tenant of a call that `AccessInterceptor` has accepted."""
        return "" if self.keys is None else self.keys.tenant(headers_of(context.invocation_metadata())) or ""


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a key (`authorization: Bearer KEY` or `x-api-key`) where keys are
    configured, and calls above `most` at once.

    Health checks need no key and are not counted, so clients without a key cannot use up the limit;
    `Health` limits them. Where there are several keys, each may use half of the limit.
    """

    def __init__(self, keys: KeyRing | None, most: int) -> None:
        self._keys = keys
        self._most = most
        self._running: Counter[str] = Counter()  # running calls by tenant; as many entries as keys

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(f"/{HEALTH}/"):
            return handler
        tenant = "" if self._keys is None else self._keys.tenant(headers_of(details.invocation_metadata))
        if tenant is None:
            return grpc.stream_stream_rpc_method_handler(_refuse)  # for methods of every kind: it reads no request
        shape = next(name for name in SHAPES if getattr(handler, name) is not None)
        return handler._replace(**{shape: self._counted(getattr(handler, shape), tenant)})

    def _counted(self, method: Any, tenant: str) -> Any:
        """The method, counting its running calls. grpcio distinguishes functions that return a
        reply from generators that yield replies."""

        async def acquire(context: Any) -> None:
            most_of_key = self._most if self._keys is None or len(self._keys) < 2 else max(1, self._most // 2)
            if self._running.total() >= self._most or self._running[tenant] >= most_of_key:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "server.max_connections calls are running; try again later")
            self._running[tenant] += 1

        async def returning(request: Any, context: Any) -> Any:
            await acquire(context)
            try:
                return await method(request, context)
            finally:
                self._running[tenant] -= 1

        async def yielding(request: Any, context: Any) -> AsyncIterator[Any]:
            await acquire(context)
            try:
                async for reply in method(request, context):
                    yield reply
            finally:
                self._running[tenant] -= 1

        return yielding if inspect.isasyncgenfunction(method) else returning


async def _refuse(requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong; send the metadata authorization: Bearer KEY")


def _handlers(services: Services, schema: Schema, calls: CallHandlers) -> Any:
    service, pooling = Service(services, schema), Pooling(services, schema)
    acts: dict[str, Method] = {
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
            made[name] = grpc.stream_stream_rpc_method_handler(calls.wrap_stream(act, reads), response_serializer=writes)
        elif method.server_streaming:
            made[name] = grpc.unary_stream_rpc_method_handler(calls.wrap_unary(name, act, reads), response_serializer=writes)
        else:
            made[name] = grpc.unary_unary_rpc_method_handler(calls.wrap_unary(name, act, reads), response_serializer=writes)
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
