"""`StreamMover`: passes on a stream whose replica sends its state beside the events, and lets
another replica continue it where the first one is lost or drains.

A stream that cannot move ends as one without a fleet key: with an error event. Used by the proxy.
Must not know a dialect, or what the records hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Sequence

import httpx
import msgspec

from frame.entrypoints.handoff import DRAINING, END, EVENTS, HEADER, PIECE, START, VERSION, FleetKey, FrameReader, SealedHandoff
from frame.entrypoints.http.errors import ApiError, DisconnectedError, ResponseCutError
from frame.entrypoints.router.exchange import (
    REFUSED,
    Exchange,
    Losses,
    LostError,
    Parts,
    RoutedRequest,
    error_event,
    find_reason,
    kept,
    next_chunk,
    read_sentence,
    read_short,
)
from frame.entrypoints.router.metrics import RouterMetrics
from frame.entrypoints.router.replicas import Backend, Backends, Place
from frame.interfaces.routing import RoutingRequest

log = logging.getLogger(__name__)

# Streams of these routes move. Others end with their replica.
MOVABLE = frozenset(("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/api/chat", "/api/generate", "/v2/chat"))
MAX_KEPT = 4 << 20  # bytes of the records of one stream; a longer one does not move
MAX_KEPT_IN_ALL = 256 << 20  # of all streams
PROGRESS = 4  # events after a loss that clear the stream of it, as in `RequestRecovery`
MOVE_TIME = 10.0  # seconds to find a replica that continues a stream
PAUSE = 0.1  # seconds between two tries
_LIST_HEAD = struct.Struct(">BI")  # of a list in MessagePack, with the number of its elements
DRAIN_PAUSE = 1.0  # seconds between two tries to move a stream whose replica goes on meanwhile
HEAD_TIME = 30.0  # seconds in which a replica begins to continue a stream


class _Stream:
    """What the router keeps of one stream. `problem`: why it cannot move; "": it can."""

    def __init__(self, request: RoutedRequest, identity: str, losses: Losses) -> None:
        self.request, self.identity, self.losses = request, identity, losses
        self.arrived = time.monotonic()
        self.start = b""
        self.records, self.num_records = bytearray(), 0  # one after the other
        self.size = 0
        self.problem = ""
        self.is_ended = self.is_within_event = self.is_asked = False
        self.last = b""  # the last two bytes that were sent
        self.num_events = self.lost_at = 0

    async def record_loss(self, backend: Backend, *, is_silent: bool) -> tuple[str, set[int]]:
        """Count a replica that was lost with it. -> (why the stream ends; "": it may move, the
        numbers of replicas that were only late)."""
        if self.num_events - self.lost_at > PROGRESS:
            self.losses.clear()
        self.losses.add(backend, is_silent=is_silent)
        self.lost_at = self.num_events
        late = await self.losses.wait_late(self.request.gone) if self.losses.may_be_caused else set[int]()
        if self.losses.may_be_caused:
            return f"it is the {self.losses.count}. one with this request, which may be the cause", late
        return ("a part of an event was sent" if self.is_within_event else self.problem), late


class StreamMover:
    """Passes on streams as frames and moves them. `key` signs what it sends."""

    def __init__(self, key: FleetKey, backends: Backends, exchange: Exchange, metrics: RouterMetrics) -> None:
        self._key, self._backends, self._exchange, self._metrics = key, backends, exchange, metrics
        self._num_kept = 0  # bytes

    def signature(self, request: RoutedRequest, backend: Backend) -> bytes:
        """The header that asks for frames; empty where the stream could not move."""
        is_movable = request.method == "POST" and request.path in MOVABLE and backend.instance
        return self._key.sign(request.path) if is_movable else b""

    async def pass_on(self, request: RoutedRequest, routing: RoutingRequest, place: Place, reply: httpx.Response, losses: Losses) -> None:
        """Pass on a stream to its end. `losses`: of the request. Raises LostError before its first
        byte."""
        stream, first = _Stream(request, place.backend.identity, losses), reply
        try:
            while True:
                frames = _Frames(reply)
                moved: httpx.Response | str = ""
                with contextlib.closing(Parts(request, place.backend, can_move=True)) as parts:
                    lost = await self._read(stream, place.backend, frames, parts, first)
                    while not lost and not stream.is_ended:  # the replica drains
                        moved = await self._move(stream, routing, place, is_lost=False)
                        if isinstance(moved, httpx.Response):
                            break
                        lost = await self._read(stream, place.backend, frames, parts, first, pause=DRAIN_PAUSE)
                if stream.is_ended:
                    with contextlib.suppress(LostError, httpx.HTTPError, OSError, ValueError):
                        await self._exchange.wait(request, place.backend, frames.read())  # so that the connection is kept
                    self._metrics.count("answered")
                    return
                if lost is not None:
                    if not stream.start and not stream.num_events:
                        raise lost
                    moved, _ = await stream.record_loss(place.backend, is_silent=lost.is_silent)
                    moved = moved or await self._move(stream, routing, place, is_lost=True)
                    if not isinstance(moved, httpx.Response):
                        await self._end(stream, f"replica {place.backend.url} is lost: {lost}", moved, first)
                        return
                assert isinstance(moved, httpx.Response)
                await reply.aclose()
                reply = moved
        finally:
            self._drop(stream)
            await reply.aclose()

    async def _read(
        self, stream: _Stream, backend: Backend, frames: _Frames, parts: Parts, first: httpx.Response, pause: float = 0.0
    ) -> LostError | None:
        """Pass on frames until the stream ends, or should move. -> why the replica is lost; None:
        it is not. `pause`: seconds before a move of a draining replica is tried again."""
        until = time.monotonic() + pause
        while not stream.is_ended:
            try:
                received = await parts.wait(frames.read)
            except (LostError, httpx.HTTPError, OSError, ValueError) as error:
                await backend.group.check(backend, is_suspect=True)
                log.warning("a stream breaks off: replica %s is lost: %s", backend.url, error)
                is_silent = isinstance(error, LostError) and error.is_silent
                return LostError(find_reason(error), was_sent=True, is_silent=is_silent)
            if received is None:
                return LostError("it ended the answer too early", was_sent=True)
            for kind, record, body in received:
                await self._take(stream, kind, record, body, first)
            wants_move = (stream.is_asked or backend.state == "draining") and time.monotonic() >= until
            if wants_move and stream.start and not (stream.is_within_event or stream.problem or stream.is_ended):
                return None
        return None

    async def _take(self, stream: _Stream, kind: int, record: bytes, body: bytes, first: httpx.Response) -> None:
        """Pass on a frame and keep its record."""
        if kind == DRAINING:
            stream.is_asked = True
            return
        if kind == START:
            if not stream.start and not stream.problem:
                stream.start = record
                self._keep(stream, len(record))
                head = [pair for pair in kept(first.headers.raw) if pair[0] != HEADER]
                await stream.request.send({"type": "http.response.start", "status": 200, "headers": head})
            return
        if kind == EVENTS:
            stream.num_events += 1
            if not stream.problem:
                stream.records += record
                stream.num_records += 1
                self._keep(stream, len(record))
        stream.is_within_event = kind == PIECE
        stream.is_ended = kind == END
        stream.last = (stream.last + body[-2:])[-2:]
        await stream.request.send({"type": "http.response.body", "body": body, "more_body": not stream.is_ended})

    def _keep(self, stream: _Stream, size: int) -> None:
        stream.size += size
        self._num_kept += size
        if stream.size > MAX_KEPT or self._num_kept > MAX_KEPT_IN_ALL:
            stream.problem = f"the stream has more than {MAX_KEPT} bytes of state, or all streams more than {MAX_KEPT_IN_ALL}"
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        self._num_kept -= stream.size
        stream.size = 0
        stream.records = bytearray()

    async def _move(self, stream: _Stream, routing: RoutingRequest, place: Place, *, is_lost: bool) -> httpx.Response | str:
        """The answer of a replica that continues the stream, whose place then is there; or why none
        does. `is_lost`: the stream's replica is; else it is tried once."""
        request, deadline = stream.request, time.monotonic() + MOVE_TIME
        reason, refused = self._backends.closing or "no other replica is there", set[str]()
        tried = {place.backend.number}  # first; its connection may be all that broke
        while True:
            backend = self._backends.choose(routing, tried, request.prefixes)
            if backend is None:
                candidates = {each.instance for each in self._backends.healthy if each.instance}
                if self._backends.closing or not is_lost or time.monotonic() > deadline or (candidates and candidates <= refused):
                    return reason
                if request.gone.done():
                    raise DisconnectedError
                await asyncio.sleep(PAUSE)
                tried.clear()
                continue
            tried.add(backend.number)
            taken, has_moved = Place(backend, request.prefixes), False  # counts meanwhile: all streams of a replica move at once
            if not backend.instance:
                reason = f"replica {backend.url} has no fleet key"
                self._backends.refuse(routing, taken)
                taken.leave()
                continue
            try:
                moved = await self._continue(stream, backend)
                has_moved = isinstance(moved, httpx.Response)
            except LostError as error:
                reason = f"replica {backend.url} is lost: {error}"
                if error.was_sent:
                    why, late = await stream.record_loss(backend, is_silent=error.is_silent)
                    if why:
                        return f"{reason}; {why}"
                    if late:  # which took their time: the stream may go on there
                        tried, deadline = tried - late, time.monotonic() + MOVE_TIME
                continue
            except (ApiError, httpx.HTTPError, OSError) as error:
                reason = str(error) if isinstance(error, ApiError) else f"replica {backend.url} failed: {find_reason(error)}"
                continue
            finally:
                if not has_moved:
                    self._backends.refuse(routing, taken)
                    taken.leave()
            if isinstance(moved, httpx.Response):
                log.info("a stream moves from %s to %s", place.backend.url, backend.url)
                self._metrics.count_move("lost" if is_lost else "drained")
                place.move(taken)
                stream.is_asked = False
                return moved
            status, sentence = moved
            reason = f"replica {backend.url} does not continue it: {sentence}"
            if status not in REFUSED:
                refused.add(backend.instance)

    async def _continue(self, stream: _Stream, backend: Backend) -> httpx.Response | tuple[int, str]:
        """Ask a replica to continue a stream. -> its answer, or the status and reason of a
        refusal."""
        request, raw = stream.request, msgspec.Raw
        age = time.monotonic() - stream.arrived
        records = _LIST_HEAD.pack(0xDD, stream.num_records) + stream.records
        sealed = SealedHandoff(version=VERSION, identity=stream.identity, age=age, start=raw(stream.start), records=raw(records))
        handoff = msgspec.msgpack.encode(sealed)
        signature = self._key.sign(request.path, backend.instance, handoff, request.body)
        async with asyncio.timeout(HEAD_TIME):
            reply = await self._exchange.open(request, backend, signature, handoff)
            if reply.status_code == 200 and HEADER.decode() in reply.headers:
                return reply
            short = await self._exchange.wait(request, backend, read_short(reply))
        return short.status, read_sentence(short.body)

    async def _end(self, stream: _Stream, reason: str, why: str, first: httpx.Response) -> None:
        """End a stream that no replica continues."""
        self._metrics.count("broken")
        self._metrics.count_move("failed")
        log.warning("a stream ends: %s; %s", reason, why)
        if not first.headers.get("content-type", "").startswith("text/event-stream"):
            raise ResponseCutError
        event = error_event(stream.request, f"{reason}, while it answered request {stream.request.request_id}; {why}")
        before = b"" if stream.last in (b"", b"\n\n") else b"\n\n"  # not a part of a half event
        await stream.request.send({"type": "http.response.body", "body": before + event, "more_body": False})


class _Frames:
    """The frames of one answer."""

    def __init__(self, reply: httpx.Response) -> None:
        self._chunks, self._reader, self._has_start = reply.aiter_raw().__aiter__(), FrameReader(), False

    async def read(self) -> Sequence[tuple[int, bytes, bytes]] | None:
        """The next frames; None at the end. Raises ValueError for what is no frame, and before a
        frame START for others."""
        chunk = await next_chunk(self._chunks)
        frames = [] if chunk is None else list(self._reader.feed(chunk))
        for kind, record, _ in frames:
            self._has_start |= kind == START and bool(record)
            if not self._has_start and kind != DRAINING:
                raise ValueError("the response has a frame before its start")
        return None if chunk is None else frames
