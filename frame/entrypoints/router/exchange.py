"""`Exchange`: one request to one replica: its head, its body and its end, or its loss.

Used by the proxy and by what moves streams. Must not know how replicas are chosen.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from frame.entrypoints.handoff import HEADER
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, DisconnectedError
from frame.entrypoints.http.request_context import BLOCKS
from frame.entrypoints.router.cached_prefixes import PromptPrefixes
from frame.entrypoints.router.connections import InformationalError, ResponseHeadError
from frame.entrypoints.router.metrics import RouterMetrics
from frame.entrypoints.router.replicas import Backend
from frame.entrypoints.router.requests import is_repeatable

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
MAX_LOST = 2  # replicas that may be lost while they have the same request, and it makes no progress
MAX_LOST_IN_ALL = 4
LATE_TIME = 10.0  # seconds in which a replica that was silent may answer again
PAUSE = 0.1  # seconds between two looks


class LostError(Exception):
    """The replica is gone. `was_sent`: it may have got the request. `is_silent`: it did not answer,
    and no connection broke."""

    def __init__(self, reason: str, *, was_sent: bool, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.was_sent, self.is_silent = was_sent, is_silent


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
    is_begun: bool = False  # by a prefill server, and no decode server has answered yet

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


class Losses:
    """The replicas that were lost while they had one request, which may be the cause. One that was
    silent and answers again was only late."""

    def __init__(self) -> None:
        self._recent: list[tuple[Backend, bool]] = []
        self.count = 0  # in all

    def add(self, backend: Backend, *, is_silent: bool) -> None:
        self._recent.append((backend, is_silent))
        self.count += 1

    def clear(self) -> None:
        """The request makes progress."""
        self._recent.clear()

    @property
    def may_be_caused(self) -> bool:
        """Whether the request may be the cause, so that it is sent to no other replica."""
        return len(self._recent) >= MAX_LOST or self.count >= MAX_LOST_IN_ALL

    async def wait_late(self, gone: asyncio.Future[Any]) -> set[int]:
        """The numbers of replicas that were only late, which may get the request again and are no
        losses any more. Waits for one where a replica was silent. Raises DisconnectedError."""
        deadline, late = time.monotonic() + LATE_TIME, set[int]()
        while not late and self.count < MAX_LOST_IN_ALL and any(is_silent for _, is_silent in self._recent):
            late = {backend.number for backend, is_silent in self._recent if is_silent and backend.is_healthy}
            if not late and ((await asyncio.wait((gone,), timeout=PAUSE))[0] or time.monotonic() > deadline):
                break
        if gone.done():
            raise DisconnectedError
        self._recent = [each for each in self._recent if each[0].number not in late]
        return late


class Parts:
    """Waits for the parts of one answer, in the task that made it. The loss of the replica, and a
    client that leaves, cancel the wait: a task for each part would cost as much as the part."""

    def __init__(self, request: RoutedRequest, backend: Backend, *, can_move: bool = False) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._backend, self._gone = task, backend, request.gone
        self._lost = backend.watch_lost(can_move=can_move)
        self._is_waiting = self._is_cancelled = False
        for each in (self._lost, self._gone):
            each.add_done_callback(self._interrupt)

    def _interrupt(self, _: asyncio.Future[None]) -> None:
        if self._is_waiting and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    async def wait(self, read: Callable[[], Awaitable[T]]) -> T:
        """The result. Raises LostError, DisconnectedError."""
        if not (self._lost.done() or self._gone.done()):
            num_cancelled, self._is_waiting = self._task.cancelling(), True
            try:
                result = await read()
                self._backend.heard = time.monotonic()
                return result
            except asyncio.CancelledError:
                if not self._is_cancelled or self._task.uncancel() > num_cancelled:
                    raise  # the task's own
            finally:
                self._is_waiting = False
        if self._gone.done():
            raise DisconnectedError
        raise _lost_error(self._backend)

    def close(self) -> None:
        """No part is waited for any more."""
        self._backend.watchers.pop(self._lost, None)
        self._gone.remove_done_callback(self._interrupt)


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
        lost = backend.watch_lost(can_move=is_repeatable(request.method, request.path))
        waiting: Iterable[asyncio.Future[Any]] = (task, lost, request.gone)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                result = task.result()
                backend.heard = time.monotonic()
                return result
            if lost.done():
                raise _lost_error(backend)
            raise DisconnectedError
        finally:
            backend.watchers.pop(lost, None)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _lost_error(backend: Backend) -> LostError:
    reason = backend.group.closing or ("it does not answer" if backend.lost.is_set() else "it is not ready")
    return LostError(reason, was_sent=True, is_silent=backend.was_silent)


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


def read_sentence(body: bytes) -> str:
    """The message of an error's body."""
    try:
        error = msgspec.json.decode(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, RecursionError):
        return "it sent no reason"


def find_reason(error: Exception) -> str:
    """Why a replica is lost. The text of HTTP errors may quote bytes of another response."""
    return type(error).__name__ if isinstance(error, httpx.HTTPError) or not str(error) else str(error)
