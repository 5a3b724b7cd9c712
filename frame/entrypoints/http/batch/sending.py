"""Sends the requests of batches to the own routes. Used by the batch runner. Must know no file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol

from frame.entrypoints.engine_client.quotas import FairSemaphore, QuotaExceededError, QuotaLease, TenantQuotas
from frame.entrypoints.http.protocol.fields import IGNORED
from frame.entrypoints.http.request_context import Receive, Scope, Send

RETRY_INTERVAL = 0.5  # seconds before a line that got 429 or 503 is sent again


class Work(Protocol):
    """The batch of a line. `expires_at`: Unix time."""

    @property
    def endpoint(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def expires_at(self) -> int: ...


class Reply(NamedTuple):
    """The response of a route to a line. `ignored`: the fields of the body that it ignored."""

    status: int
    body: bytes
    ignored: str = ""


class ExpiredError(Exception):
    """The completion window of the batch has passed."""


class StoppedError(Exception):
    """The server stops before the batch has ended."""


class LineSender:
    """`quotas`: quotas of the API keys, in which lines count like requests over HTTP. `stopping`:
    returns whether the server is shutting down. `route`: the application behind access control; set
    before the first batch."""

    def __init__(self, concurrency: int, quotas: TenantQuotas, stopping: Callable[[], bool]) -> None:
        self.route: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None
        self._places = FairSemaphore(concurrency)
        self._quotas = quotas
        self._stopping = stopping

    async def send_until_accepted(self, work: Work, body: bytes) -> Reply:
        """The response of a request, sent again while the status is 429 or 503. Raises
        ExpiredError, StoppedError."""
        while True:
            if time.time() > work.expires_at:
                raise ExpiredError
            if self._stopping():
                raise StoppedError
            async with self._places.hold_slot(work.tenant):
                reply = await self._send_once(work, body)
            if reply.status >= 500 and self._stopping():
                raise StoppedError  # another server answers the line
            if reply.status not in (429, 503):
                return reply
            await asyncio.sleep(0.0 if self._stopping() else RETRY_INTERVAL)

    async def _send_once(self, work: Work, body: bytes) -> Reply:
        """Send a request within its key's quota; status 429 where that is exhausted."""
        try:
            with self._quotas.open_lease(work.tenant) as lease:
                return await self._call_route(work, body, lease)
        except QuotaExceededError:
            return Reply(429, b"")

    async def _call_route(self, work: Work, body: bytes, lease: QuotaLease) -> Reply:
        assert self.route is not None
        bodies, pieces, status, ignored = [body], [], 0, ""

        async def receive() -> MutableMapping[str, Any]:
            if not bodies:
                await asyncio.Event().wait()  # a batch has no client that disconnects
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, ignored
            status = message.get("status", status)
            ignored = next((value.decode() for name, value in message.get("headers", ()) if name == IGNORED), ignored)
            pieces.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": work.endpoint, "root_path": "", "query_string": b""}
        scope |= {"client": None, "headers": headers, "tenant": work.tenant, "lease": lease, "arrived": time.perf_counter()}
        await self.route(scope, receive, send)
        return Reply(status, b"".join(pieces), ignored)
