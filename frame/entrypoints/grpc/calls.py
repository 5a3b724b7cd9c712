"""`GrpcCaller` and `CallHandlers`: what surrounds each gRPC method: the API key, places and quota,
a trace span, errors as gRPC statuses. Used by the gRPC server. Must not know a method."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc

from frame.entrypoints.engine_client.quotas import PlaceShares, QuotaExceededError, QuotaLease
from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.grpc.reading import MessageReader
from frame.entrypoints.grpc.schema import SERVICE
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import sent_as, too_many
from frame.entrypoints.http.protocol.access import AdminGuard, find_holder
from frame.entrypoints.http.request_starter import read_timeout_header
from frame.entrypoints.http.services import Services
from frame.entrypoints.keys import KeyAccess
from frame.entrypoints.logs import REQUEST_ID, request_id_of
from frame.interfaces.keys import KeyHolder

STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
MAX_METADATA = 128  # of a call
NO_DEADLINE = 1e8  # seconds; grpc reports more than this for a call without a deadline
UNTRACED = frozenset({"ServerInfo"})  # polled by monitoring


class GrpcCaller:
    """The sender of a gRPC call. `headers` are the call's metadata."""

    handoff = None  # only HTTP streams move

    def __init__(self, context: Any, holder: KeyHolder | None, lease: QuotaLease | None = None) -> None:
        self.context = context
        self.headers = headers_of(context.invocation_metadata())
        self.holder = holder
        self.tenant = "" if holder is None else holder.tenant
        self.lease = lease
        self.request_id = request_id_of(self.headers)
        self.state: RequestState | None = None
        REQUEST_ID.set(self.request_id)

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    def on_disconnect(self, act: Callable[[], None]) -> None:
        """Nothing to do: cancelling a call cancels its handler, which aborts its request."""

    def time_left(self) -> float | None:
        """Seconds until the call's deadline, or those of x-request-timeout if they are fewer; None
        without either. Raises ApiError 400."""
        limit = read_timeout_header(self)
        seconds: float | None = self.context.time_remaining()
        if seconds is None or seconds > NO_DEADLINE:
            return limit
        return min(max(seconds, 0.001), math.inf if limit is None else limit)


class BoundedHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Refuses calls with too many metadata before a method looks at them. grpc bounds the bytes of
    each HTTP/2 frame with metadata, not those of all frames of a call."""

    def __init__(self, handlers: Any) -> None:
        self._handlers = handlers
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse_metadata)

    def service(self, handler_call_details: Any) -> Any:
        if len(handler_call_details.invocation_metadata or ()) > MAX_METADATA:
            return self._refusal
        return self._handlers.service(handler_call_details)


async def _refuse_metadata(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the call has more than {MAX_METADATA} metadata; send fewer")


Method = Callable[[Any, GrpcCaller], Awaitable[Any]]  # of a request; returns a reply, or None where it has written its replies
Session = Callable[[AsyncIterator[tuple[Any, int]], GrpcCaller], Awaitable[None]]  # of requests and their bytes


class CallHandlers:
    """Wraps the service's methods as the handlers that grpcio calls. All are handlers of streams,
    because grpcio reads the message of other calls before it calls the handler; the metadata comes
    first, so a call is admitted before its message is read.
    """

    def __init__(self, services: Services, keys: KeyAccess | None, reader: MessageReader) -> None:
        num_keys = 1 if keys is None else keys.num_tenants
        self._services = services
        self._keys = keys
        self._admin = AdminGuard(services.resolved.user.server, is_dedicated=False, has_keys=keys is not None)
        self._reader = reader
        self._calls = PlaceShares(services.resolved.user.server.max_connections, num_keys)
        self._sessions = PlaceShares(reader.max_sessions, num_keys)

    @asynccontextmanager
    async def admit(self, context: Any, is_session: bool, *, is_operators: bool = False) -> AsyncIterator[KeyHolder | None]:
        """The holder of a call's key, None without keys. is_operators: a call of an operator's
        method, which the admin key admits alone. The call holds a place meanwhile. Refused calls,
        and those with an ApiError, end with a status."""
        failed: ApiError | None = None
        holder, headers = None, headers_of(context.invocation_metadata())
        if self._keys is not None:
            try:
                holder = await find_holder(self._keys, headers)
            except ApiError as error:
                await abort(context, error)
        tenant = "" if holder is None else holder.tenant
        if self._keys is not None and holder is None and not (is_operators and self._admin.opens(headers)):
            await abort(context, ApiError(401, "the API key is missing or wrong; send the metadata authorization: Bearer KEY"))
            return  # abort has raised
        limits = [(self._calls, "server.max_connections calls are running; try again later")]
        if is_session:
            limits.append((self._sessions, "too many calls with streams of requests are open; send more requests over each"))
        with ExitStack() as held:
            for places, sentence in limits:
                if not places.take_places(tenant):
                    await abort(context, ApiError(429, sentence))
                held.callback(places.release_places, tenant)
            try:
                yield holder
            except QuotaExceededError as error:
                failed = too_many(error)
            except ApiError as error:
                failed = error
            if failed is not None:
                await abort(context, failed)

    def wrap_unary(self, name: str, method: Method, kind: Any, *, is_operators: bool = False) -> Callable[[Any, Any], Awaitable[None]]:
        """A method with one request, of class `kind`, which counts in its key's quota."""

        async def handle(_: Any, context: Any) -> None:
            async with self.admit(context, False, is_operators=is_operators) as holder:
                tenant = "" if holder is None else holder.tenant
                with self._services.quotas.open_lease(tenant) as lease:
                    caller = GrpcCaller(context, holder, lease)
                    request, size = await self._reader.read_only(context, tenant, kind)
                    try:
                        if is_operators:
                            self._admin.check(caller.headers, holder)
                        reply = await run_call(self._services, caller, name, method(request, caller))
                    finally:
                        self._reader.release(size, tenant)
                if reply is not None:
                    await context.write(reply)

        return handle

    def wrap_stream(self, session: Session, kind: Any) -> Callable[[Any, Any], Awaitable[None]]:
        """A method with a stream of requests. It applies the quota itself, and its iterator raises
        the errors of undecodable messages."""

        async def handle(_: Any, context: Any) -> None:
            async with self.admit(context, True) as holder:
                caller = GrpcCaller(context, holder)
                await session(self._messages(context, caller.tenant, kind), caller)

        return handle

    async def _messages(self, context: Any, tenant: str, kind: Any) -> AsyncIterator[tuple[Any, int]]:
        while (data := await context.read()) is not grpc.aio.EOF:
            yield await self._reader.decode(data, tenant, kind)


async def run_call(services: Services, caller: GrpcCaller, name: str, work: Awaitable[Any]) -> Any:
    """The result of `work` in a span of the method; then its request is aborted."""
    tracing = None if name in UNTRACED else services.tracing
    span = None if tracing is None else tracing.start(f"{SERVICE}/{name}", caller.headers)
    try:
        with sent_as({"rid": "id"}):
            return await work
    finally:
        if caller.state is not None:
            services.client.abort_request(caller.state)
        if span is not None:
            span.end({"rpc.system": "grpc", "rpc.method": name, "frame.request_id": caller.request_id}, caller.state)


async def abort(context: Any, error: ApiError) -> None:
    """End the call with the error's status and message. Raises CancelledError if it has ended
    meanwhile, as by a message over the limit."""
    trailing = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
    try:
        await context.abort(status_of(error), error.message, trailing)
    except grpc.aio.InternalError as failure:
        raise asyncio.CancelledError from failure


def status_of(error: ApiError) -> Any:
    """The gRPC status that corresponds to the error's HTTP status."""
    return STATUS.get(error.status, grpc.StatusCode.INTERNAL)


def headers_of(metadata: Any) -> list[tuple[bytes, bytes]]:
    """A call's metadata in the form of HTTP headers."""
    return [(str(k).encode(), v if isinstance(v, bytes) else v.encode("latin-1", "replace")) for k, v in metadata or ()]
