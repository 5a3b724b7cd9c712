"""`SessionCaller`: who a response or a transcription of a session is for.

Each has a lease of its key's quota and memory of its own; the session's handshake is its HTTP
request. Used by `responses` and `transcription`. Must not know an event.
"""

from __future__ import annotations

from collections.abc import Callable

from frame.entrypoints.engine_client.quotas import QuotaExceededError, QuotaLease
from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import too_many
from frame.entrypoints.http.protocol.access import find_holder
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.services import Services


class SessionCaller:
    """Implements `Caller`. Raises ApiError 429 where the key has as many requests as it may."""

    handoff = None  # a session does not move to another server

    def __init__(self, context: RequestContext, services: Services) -> None:
        self.state: RequestState | None = None
        self.tenant, self.request_id = context.tenant, context.request_id
        try:
            self.lease: QuotaLease | None = services.quotas.open_lease(self.tenant) if self.tenant else None
        except QuotaExceededError as error:
            raise too_many(error) from None
        self._context, self._services = context, services
        self._held = 0

    def header(self, name: bytes) -> str | None:
        return self._context.header(name)

    def on_disconnect(self, act: Callable[[], None]) -> None:
        """Ignore: the session cancels what it runs when it ends."""

    def hold(self, size: int) -> None:
        """Count bytes as held until `close`. Raises ApiError."""
        self._context.hold(size)
        self._held += size

    @classmethod
    async def open(cls, context: RequestContext, services: Services) -> SessionCaller:
        """A caller whose key is still accepted: a session outlives the reload that removes its key.
        Raises ApiError."""
        if services.keys is not None and context.tenant:
            holder = await find_holder(services.keys, context.scope["headers"])
            if holder is None or holder.tenant != context.tenant:
                raise ApiError(401, "the session's API key is not accepted any more; connect with another one", code="invalid_api_key")
        return cls(context, services)

    def close(self) -> None:
        """End what still runs, and give back all that is held."""
        if self.state is not None:
            self._services.client.abort_request(self.state)
        if self.lease is not None:
            self.lease.close()
        self._context.release(self._held)
        self._held = 0
