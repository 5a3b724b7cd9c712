"""The gRPC server: port, API keys, limits, health and reflection. It runs in the event loop of the
main process.

Every method except the health checks needs a key where keys are configured, as over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.grpc.calls import BoundedHandlers, CallHandlers, GrpcCaller, Method
from frame.entrypoints.grpc.health import NAME as HEALTH
from frame.entrypoints.grpc.health import Health
from frame.entrypoints.grpc.pooling import Pooling
from frame.entrypoints.grpc.reading import MessageReader
from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.service import Service
from frame.entrypoints.http.app import body_limits
from frame.entrypoints.http.protocol.bodies import Bodies
from frame.entrypoints.http.protocol.listening import address
from frame.entrypoints.http.services import Services
from frame.entrypoints.logs import report
from frame.entrypoints.tls import Certificate, load_certificate

HEALTH_INTERVAL = 0.2  # seconds between updates of the health status
OPERATORS = frozenset({"Abort", "ServerInfo"})  # methods that need the admin key
MAX_CALLS_PER_CONNECTION = 256
MAX_PENDING_CALLS = 32 * MAX_CALLS_PER_CONNECTION  # of all connections
CLOSE_TIMEOUT = 0.5  # seconds in which running calls may send their last messages
# Seconds after it in which connections may close. grpc waits 20 s for a client that does not read.
SHUTDOWN_TIMEOUT = 1.0


class GrpcServer:
    """Made and used in a running event loop. `bodies`: the pool of HTTP's bodies. Raises
    ConfigurationError."""

    def __init__(self, services: Services, host: str, port: int, bodies: Bodies) -> None:
        server = services.resolved.user.server
        self._services = services
        keys = services.keys
        max_bytes = body_limits(services)["prompts"]
        self._server = grpc.aio.server(options=_options(server, max_bytes))
        self._health = Health(("", SERVICE))
        self._watching: asyncio.Task[None] | None = None
        reader = MessageReader(bodies, max_bytes, server.client_timeout, 0 if keys is None else keys.num_tenants)
        calls = CallHandlers(services, keys, reader)
        handlers = _handlers(services, calls, reader), self._health.build_handlers(), _reflection(calls, reader)
        self._server.add_generic_rpc_handlers(tuple(BoundedHandlers(each) for each in handlers))
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
        await asyncio.wait({asyncio.ensure_future(self._server.stop(CLOSE_TIMEOUT))}, timeout=CLOSE_TIMEOUT + SHUTDOWN_TIMEOUT)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            self._update_health()

    def _update_health(self) -> None:
        self._health.set_status(self._services.ready_problem() is None)


def _options(server: ServerSection, max_bytes: int) -> list[tuple[str, int]]:
    """The limits that grpcio applies, before any key is known."""
    timeout = int(1000 * server.client_timeout)
    return [
        ("grpc.so_reuseport", 0),  # or two servers could listen on one port unnoticed
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
        # Per connection, health checks included. A call that its client resets counts until
        # Python has seen it, so few calls of one connection precede those of another.
        ("grpc.max_concurrent_streams", min(MAX_CALLS_PER_CONNECTION, server.max_connections)),
        # Calls that Python has not seen. Above the first number grpc cancels calls of any
        # client.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        ("grpc.max_allowed_incoming_connections", server.max_connections),
        ("grpc.server_handshake_timeout_ms", timeout),  # until TLS and HTTP/2 have begun
        ("grpc.max_connection_idle_ms", timeout),  # without calls; clients connect again by themselves
        ("grpc.http2.bdp_probe", 0),  # or each call could send megabytes ahead that are not asked for
    ]


def _handlers(services: Services, calls: CallHandlers, reader: MessageReader) -> Any:
    schema = Schema()
    service, pooling = Service(services, schema, reader.release), Pooling(services, schema)
    acts: dict[str, Method] = {
        "Generate": service.generate,
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
    handlers = {}
    for name, method in schema.methods.items():
        reads, writes = schema[method.input_type.name], schema[method.output_type.name].SerializeToString
        if method.client_streaming:
            handle = calls.wrap_stream(service.generate_stream, reads)
        else:
            handle = calls.wrap_unary(name, acts[name], reads, is_operators=name in OPERATORS)
        handlers[name] = grpc.stream_stream_rpc_method_handler(handle, response_serializer=writes)
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _reflection(calls: CallHandlers, reader: MessageReader) -> Any:
    """Server reflection, as a session: it needs a key and counts like other calls."""
    servicer = reflection.aio.ReflectionServicer((SERVICE, HEALTH, reflection.SERVICE_NAME))
    request, reply = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse

    async def run(requests: AsyncIterator[tuple[Any, int]], caller: GrpcCaller) -> None:
        async for each, size in requests:
            try:
                async for response in servicer.ServerReflectionInfo(_once(each), caller.context):
                    await caller.context.write(response)
            finally:
                reader.release(size, caller.tenant)

    handler = grpc.stream_stream_rpc_method_handler(calls.wrap_stream(run, request), response_serializer=reply.SerializeToString)
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})


async def _once(value: Any) -> AsyncIterator[Any]:
    yield value


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
