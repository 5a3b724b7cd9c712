"""`GrpcCaller` and `Entrance`: what becomes of a gRPC call before and after its method: the key's share, a span, errors as statuses.

Knows no method.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from frame.entrypoints.engine_client.quotas import QuotaExceededError, QuotaLease
from frame.entrypoints.grpc.schema import SERVICE, read
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import too_many
from frame.entrypoints.http.services import Services
from frame.entrypoints.logs import REQUEST_ID, request_id_of

if TYPE_CHECKING:
    from frame.entrypoints.engine_client.response_state import RequestState

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
ENDLESS = 1e8  # seconds; what grpc says for no deadline
UNTRACED = frozenset({"ServerInfo"})  # what is looked at all the time


class GrpcCaller:
    """Who calls, as `Services.begin` wants to know it. `headers` are the call's metadata."""

    def __init__(self, context: Any, tenant: str, lease: QuotaLease | None = None) -> None:
        self.context = context
        self.headers = headers_of(context.invocation_metadata())
        self.tenant = tenant
        self.lease = lease
        self.request_id = request_id_of(self.headers)
        self.answer: RequestState | None = None
        REQUEST_ID.set(self.request_id)

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    def on_disconnect(self, act: Callable[[], None]) -> None:
        """Nothing: a call that is cancelled cancels its handler, which gives its answer up."""

    def time_left(self) -> float | None:
        """Seconds until the call's deadline; None where it has none."""
        seconds: float | None = self.context.time_remaining()
        return None if seconds is None or seconds > ENDLESS else max(seconds, 0.001)


Act = Callable[[Any, GrpcCaller], Awaitable[Any]]  # request or requests, who calls


class Entrance:
    """Makes of our methods those that grpcio calls: with bytes, since bytes that are no message would be a fault of the server for it."""

    def __init__(self, services: Services, tenant_of: Callable[[Any], str]) -> None:
        self._services = services
        self._tenant_of = tenant_of

    def one(self, name: str, act: Act, kind: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
        """For a method of one request of class `kind`, which counts for its key."""

        async def opened(data: bytes, context: Any) -> Any:
            tenant, found = self._tenant_of(context), None
            try:
                with self._services.quotas.open_lease(tenant) as lease:
                    caller = GrpcCaller(context, tenant, lease)
                    return await traced(self._services, caller, name, act(read(kind, data), caller))
            except QuotaExceededError as error:
                found = too_many(error)
            except ApiError as error:
                found = error
            return await abort(context, found)

        return opened

    def each(self, act: Act, kind: Any) -> Callable[[AsyncIterator[bytes], Any], Awaitable[Any]]:
        """For a method of many requests, which sees to them itself, and whose reader meets the errors of bytes."""

        async def opened(stream: AsyncIterator[bytes], context: Any) -> Any:
            try:
                return await act(_reading(stream, kind), GrpcCaller(context, self._tenant_of(context)))
            except ApiError as error:
                return await abort(context, error)

        return opened


async def _reading(stream: AsyncIterator[bytes], kind: Any) -> AsyncIterator[Any]:
    async for data in stream:
        yield read(kind, data)


async def traced(services: Services, caller: GrpcCaller, name: str, act: Awaitable[Any]) -> Any:
    """`act`, as a span of the method `name`, where there are traces."""
    tracing = None if name in UNTRACED else services.tracing
    if tracing is None:
        return await act
    span = tracing.start(f"{SERVICE}/{name}", caller.headers)
    try:
        return await act
    finally:
        span.end({"rpc.system": "grpc", "rpc.method": name, "frame.request_id": caller.request_id}, caller.answer)


async def abort(context: Any, error: ApiError) -> None:
    """End the call with the error's status and sentence."""
    trailing = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
    await context.abort(status_of(error), error.message, trailing)


def status_of(error: ApiError) -> Any:
    """The gRPC status that stands for an HTTP one."""
    return STATUS.get(error.status, grpc.StatusCode.INTERNAL)


def headers_of(metadata: Any) -> list[tuple[bytes, bytes]]:
    """A call's metadata, as HTTP's headers."""
    return [(str(k).encode(), v if isinstance(v, bytes) else v.encode("latin-1", "replace")) for k, v in metadata or ()]
