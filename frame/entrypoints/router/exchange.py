"""`Exchange`: one request to one replica: its head, its body and its end, or its loss.

Used by the proxy and by what moves streams. Must not know how replicas are chosen.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from frame.entrypoints.handoff import HEADER
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, DisconnectedError
from frame.entrypoints.http.request_context import BLOCKS
from frame.entrypoints.router.cached_prefixes import PromptPrefixes
from frame.entrypoints.router.connections import InformationalError, ResponseHeadError
from frame.entrypoints.router.replicas import Backend, RouterMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]
# Headers of one connection (RFC 9110, section 7.6.1), those that the next end sets itself, and what
# replicas tell the router alone.
# `Host` goes on: by it a replica without a key refuses requests of pages of another name.
_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
     b"content-length", b"expect", b"date", BLOCKS)
)  # fmt: skip
SESSION = b"x-session-id"
MAX_REFUSAL_LENGTH = 1 << 20  # bytes of an answer that is read before it is passed on
STATUSES = range(200, 600)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # what no header may hold
REFUSED = (429, 503)  # the replica took nothing


class LostError(Exception):
    """The replica is gone. `was_sent`: it may have got the request."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


@dataclass
class RoutedRequest:
    """One request. `gone` ends when the client leaves."""

    method: str
    target: bytes  # path and query, as they came
    path: str  # decoded, without a slash at its end, as replicas match it
    headers: Headers
    body: bytes
    request_id: str
    send: Any
    gone: asyncio.Task[None]
    tried: set[int] = field(default_factory=set)
    prefixes: PromptPrefixes | None = None  # of its prompt, where replicas publish events

    @property
    def session(self) -> str:
        """What the client calls the conversation."""
        return next((value.decode("latin-1") for name, value in self.headers if name == SESSION), "")


@dataclass(frozen=True)
class ShortReply:
    """A whole answer of a replica."""

    status: int
    headers: Headers
    body: bytes

    async def send(self, send: Any) -> None:
        headers = [*self.headers, (b"content-length", str(len(self.body)).encode())]
        if self.status in REFUSED and b"retry-after" not in dict(headers):
            headers.append((b"retry-after", str(RETRY_AFTER).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class Exchange:
    """Sends requests to replicas."""

    def __init__(self, client: httpx.AsyncClient, metrics: RouterMetrics) -> None:
        self._client, self._metrics = client, metrics

    async def open(
        self, request: RoutedRequest, backend: Backend, signature: bytes = b"", handoff: bytes = b"", asks_blocks: bytes = b""
    ) -> httpx.Response:
        """The head of a replica's answer. `signature`: the header of the fleet; `handoff`: goes
        before the body; `asks_blocks`: the signature that asks for the prompt's blocks. Raises
        LostError, ApiError 400 for a request that cannot be sent, and 502 for an answer that cannot
        be passed on."""
        headers = [*request.headers, *((name, value) for name, value in ((BLOCKS, asks_blocks), (HEADER, signature)) if value)]
        exact = {"target": request.target}  # a URL's path would be normalized
        forwarded = self._client.build_request(
            request.method, backend.url, headers=headers, content=handoff + request.body or None, extensions=exact
        )
        try:
            reply = await self.wait(request, backend, self._client.send(forwarded, stream=True))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            backend.group.mark_lost(backend, f"{type(error).__name__} {error}")
            raise LostError("it does not accept connections", was_sent=False) from None
        except httpx.LocalProtocolError as error:
            raise ApiError(400, f"the request cannot be passed on to a replica: {error}; send valid HTTP/1.1") from None
        except (httpx.HTTPError, OSError) as error:  # its text may quote bytes of another answer
            log.warning("replica %s: %s %s", backend.url, type(error).__name__, error)
            await backend.group.check(backend, is_suspect=True)
            if isinstance(error, ResponseHeadError) and not isinstance(error, InformationalError):
                raise self._refuse_head(request, backend, str(error)) from None
            reason = f"it sent {error}" if isinstance(error, InformationalError) else type(error).__name__
            raise LostError(reason, was_sent=True) from None
        if reply.status_code not in STATUSES or any(_CONTROL.search(value) for _, value in reply.headers.raw):
            await reply.aclose()
            what = f"status {reply.status_code}" if reply.status_code not in STATUSES else "a header with control characters"
            raise self._refuse_head(request, backend, what)
        return reply

    def _refuse_head(self, request: RoutedRequest, backend: Backend, what: str) -> ApiError:
        self._metrics.count("broken")
        return ApiError(502, f"replica {backend.url} sent {what} to request {request.request_id}, which is not repeated")

    async def wait(self, request: RoutedRequest, backend: Backend, what: Awaitable[T]) -> T:
        """The result, unless the client leaves or the replica is lost before."""
        task: asyncio.Future[T] = asyncio.ensure_future(what)
        lost = backend.watch_lost()
        waiting: Iterable[asyncio.Future[Any]] = (task, lost, request.gone)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                result = task.result()
                backend.heard = time.monotonic()
                return result
            if lost.done():
                raise LostError("it does not answer", was_sent=True)
            raise DisconnectedError
        finally:
            backend.watchers.discard(lost)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that go on: without those of one connection, which `Connection` may name."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {option.strip() for name, value in pairs if name == b"connection" for option in value.lower().split(b",")}
    return [(name, value) for name, value in pairs if name not in _HOP and name not in named]


def error_event(request: RoutedRequest, sentence: str) -> bytes:
    """The last event of an answer that broke off, in the shape of the route's dialect."""
    error = {"type": "api_error", "message": sentence, "code": 502}
    if request.path == "/v1/messages":
        return b"event: error\ndata: " + json.dumps({"type": "error", "error": error}).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


async def read_short(reply: httpx.Response) -> ShortReply:
    """An answer, or its beginning where it does not end; compressed as it came."""
    body = b""
    try:
        async for chunk in reply.aiter_raw():
            body += chunk
            if len(body) >= MAX_REFUSAL_LENGTH:
                break
    finally:
        await reply.aclose()
    return ShortReply(reply.status_code, kept(reply.headers.raw), body)


async def next_chunk(chunks: Any) -> bytes | None:
    return await anext(chunks, None)


