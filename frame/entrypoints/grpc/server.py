"""The gRPC server: port, keys, limits, health and reflection, in the main process's loop.

Every method but the health checks needs a key, where there are keys, as over HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from frame.core.errors import ConfigurationError
from frame.entrypoints.grpc.calls import Act, Entrance, headers_of
from frame.entrypoints.grpc.pooling import Pooling
from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.service import Service
from frame.entrypoints.http.listening import address
from frame.entrypoints.http.services import Services
from frame.entrypoints.keys import KeyRing, load_keys
from frame.entrypoints.logs import report
from frame.entrypoints.tls import Certificate, load_certificate

HEALTH_EVERY = 0.2  # seconds between two looks at the server's health
CLOSE_TIMEOUT = 0.5  # seconds for last messages to leave
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class GrpcServer:
    """Raises ConfigurationError when the port is taken. Made and used in a running loop."""

    def __init__(self, services: Services, host: str, port: int) -> None:
        server = services.resolved.user.server
        self._services = services
        self._keys = load_keys(server)
        options = [
            ("grpc.so_reuseport", 0),  # two servers must not share a port unnoticed
            ("grpc.max_receive_message_length", server.max_body_bytes),
            ("grpc.max_metadata_size", 16 * 1024),
        ]
        doors = [] if self._keys is None else [KeyDoor(self._keys)]
        self._server = grpc.aio.server(interceptors=doors, options=options, maximum_concurrent_rpcs=server.max_connections)
        self._health = health.aio.HealthServicer()
        self._watching: asyncio.Task[None] | None = None
        schema = Schema()
        self._server.add_generic_rpc_handlers((_handlers(services, schema, Entrance(services, self._tenant_of)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)
        self.address = _bind(self._server, host, port, load_certificate(server))

    async def start(self) -> None:
        await self._look()
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
            await self._look()

    async def _look(self) -> None:
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if self._services.ready_problem() is None else kinds.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    def _tenant_of(self, context: Any) -> str:
        """Of a call that `KeyDoor` has let in."""
        return "" if self._keys is None else self._keys.tenant(headers_of(context.invocation_metadata())) or ""


class KeyDoor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls in that bring a key (`authorization: Bearer KEY` or `x-api-key`), and health checks."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        is_open = details.method.startswith(f"/{HEALTH}/")
        if is_open or self._keys.tenant(headers_of(details.invocation_metadata)) is not None:
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # for calls of any shape: it reads nothing


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


def _bind(server: Any, host: str, port: int, certificate: Certificate | None) -> str:
    try:
        if certificate is None:
            bound = server.add_insecure_port(address(host, port))
        else:
            bound = server.add_secure_port(address(host, port), grpc.ssl_server_credentials([certificate.pems()]))
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigurationError(f"cannot listen on {address(host, port)} for gRPC; choose another --grpc-port")
    return address(host, bound)
