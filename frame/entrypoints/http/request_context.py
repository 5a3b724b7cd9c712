"""`RequestContext`: one HTTP request and its response over plain ASGI, with the operations that
routes need. Made by `ApiRoute` for each request. Must not depend on a route or the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from frame.entrypoints.engine_client.quotas import QuotaLease
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.errors import CLOSE, OPENAI, ApiError, DisconnectedError, ErrorShape
from frame.entrypoints.http.protocol.bodies import MIN_RATE, PATIENCE, TURN_BYTES, Bodies, problem_of
from frame.entrypoints.http.protocol.fields import check_spelling, ignored_header
from frame.entrypoints.http.protocol.routing import BAD_ESCAPE
from frame.entrypoints.http.validation_errors import invalid_json, repeated_error, repeated_name
from frame.entrypoints.logs import HEADER

if TYPE_CHECKING:
    from frame.entrypoints.handoff import Handoff

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")
R = TypeVar("R")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ADAPTER = b"x-frame-adapter"  # names the version of the adapter that a response is of
BLOCKS = b"x-frame-blocks"  # tells the router the blocks of the prompt; also of its request for that
JSON = (b"content-type", b"application/json")
CLOSED = (OSError, RuntimeError)  # what sending raises on a connection whose end the server has not heard of (uvloop: RuntimeError)
INLINE_BYTES = 64 * 1024  # of a body that is looked through on the event loop
MIN_PIECE = 16 * 1024  # of a body that is kept as it came; smaller ones are joined, since each object takes some 40 bytes
BODY_PAUSE = 60.0  # seconds between two pieces of a body, where nothing else is said
LINGER = 5.0  # seconds in which the rest of a body is discarded after a response that ends the connection
EVENT_STREAM = b"text/event-stream; charset=utf-8"
MAX_PARAMETERS = 64  # of a query string
SENT_TO_ALL = frozenset({"beta", "api-version"})  # query parameters of Anthropic's and Azure's clients, which change nothing here
UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Recorder(Protocol):
    """What sends the state of a stream beside its events."""

    def note(self, changed: Sequence[SequenceState]) -> None: ...

    def close(self) -> None: ...


class RequestContext:
    """`started`: the headers of the response were sent, so an error can only be an event of the
    stream."""

    __slots__ = (
        "_bodies", "_has_rest", "_held", "_watcher", "errors", "handoff", "ignored", "max_body", "receive", "recorder", "scope", "send",
        "started", "state", "status",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, max_body: int, errors: ErrorShape = OPENAI, bodies: Bodies | None = None
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.max_body = max_body
        self.errors = errors
        self.started = False
        self.state: RequestState | None = None  # the state of its generation
        self.status = 0  # of the response, once it has started
        self.handoff: Handoff | None = None  # of the stream that the response continues
        self.recorder: Recorder | None = None  # where the router asked for frames
        self.ignored: tuple[str, ...] = ()  # fields of the body without effect, which the response names
        self._bodies = bodies or Bodies(maximum=2 * max_body, pause=BODY_PAUSE)
        self._has_rest = False  # a part of the body was asked for and may still come
        self._held = 0  # bytes of the body that count in `_bodies`
        self._watcher: asyncio.Task[None] | None = None

    # request --------------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """The id that the request brought, or a new one; in the response and in each log line."""
        return str(self.scope.get("request_id", ""))

    @property
    def tenant(self) -> str:
        """The tenant of the request's key; "" on a server without keys. What is stored for a client
        is stored by tenant."""
        return str(self.scope.get("tenant", ""))

    @property
    def lease(self) -> QuotaLease | None:
        """What the request holds of its key's quota; None without a quota."""
        return self.scope.get("lease")

    def header(self, name: bytes) -> str | None:
        """The first header of this (lower-case) name."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The pieces of the body as they arrive; none is stored. Raises ApiError 413 before more
        than the limit is read, 408 when nothing arrives and 415 for a compressed body, and
        DisconnectedError when the client disconnects."""
        self._has_rest = True
        for name, value in self.scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self.max_body:
                raise self._too_large()
            if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise ApiError(415, f"the body is compressed (content-encoding: {value[:40].decode('latin-1')}); send it uncompressed")
        loop, pause = asyncio.get_running_loop(), self._bodies.pause
        size, left, until = 0, pause, loop.time() + PATIENCE * pause
        while True:
            started = loop.time()
            message = await self._piece(left, until)
            self._has_rest = message.get("more_body", False)
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > self.max_body:
                raise self._too_large()
            left = min(pause, left - (loop.time() - started) + len(piece) / MIN_RATE)
            yield piece
            if not self._has_rest:
                return

    async def body(self) -> bytes:
        """The whole body. Raises as `pieces`, and ApiError 503 beyond the bytes of all bodies."""
        # A growing bytearray would be copied again and again, 10 ms for a few megabytes.
        pieces, small = list[bytes](), bytearray()
        async for piece in self.held_pieces():
            if not small and len(piece) >= MIN_PIECE:
                pieces.append(piece)
                continue
            small += piece
            if len(small) >= MIN_PIECE:
                pieces.append(bytes(small))
                small.clear()
        if small:
            pieces.append(bytes(small))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def held_pieces(self) -> AsyncIterator[bytes]:
        """`pieces`, which count as held until the request ends. Raises as `body`."""
        async for piece in self.pieces():
            self.hold(len(piece))
            yield piece

    def hold(self, size: int) -> None:
        """Count `size` bytes as held until the request ends. Raises ApiError 503 where all requests
        together would hold more than they may, and 429 beyond the share of the key or address."""
        self._bodies.take(size, self.owner)
        self._held += size

    def release(self, size: int) -> None:
        """Give back `size` bytes of those that are held."""
        self._bodies.give_back(size, self.owner)
        self._held -= size

    @property
    def owner(self) -> str:
        """Whose share of all bodies it takes: its key's, else its address's."""
        return self.tenant or str((self.scope.get("client") or ("",))[0])

    async def _piece(self, left: float, until: float) -> MutableMapping[str, Any]:
        """The next message of a body, for which `left` seconds are left. The body must be complete
        at `until` (the event loop's time)."""
        loop, pause = asyncio.get_running_loop(), self._bodies.pause
        try:
            async with asyncio.timeout_at(min(until, loop.time() + left)):
                message = await self.receive()
        except TimeoutError:
            limit = f"did not come within {pause:g} s" if left == pause else f"comes at less than {MIN_RATE} bytes a second"
            limit = limit if loop.time() < until else f"did not come within {PATIENCE * pause:g} s in all"
            raise ApiError(408, f"the rest of the body {limit}; send the request again", headers=CLOSE) from None
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        return message

    async def read_json(self, is_required: bool = True) -> Any:
        """The decoded body; None for an empty one that is not required. Raises ApiError."""
        data = await self.body()
        if not data or data.isspace():
            if not is_required:
                return None
            raise ApiError(400, "the body is empty; send a JSON object")
        return await self.decode(data)

    async def decode(self, data: bytes) -> Any:
        """The JSON of a body or a message, in a turn of the event loop that also has room for what
        the caller does with it at once. Raises ApiError 400."""
        problem = await run_unless_small(data, problem_of, self._bodies.max_values)
        if problem is not None:
            raise ApiError(400, problem)
        await self._bodies.turns.take_turn(self.owner, len(data))
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise await run_unless_small(data, invalid_json, error) from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply; send fewer levels") from None
        async with self._bodies.searching.hold_slot(self.owner):
            name = await run_unless_small(data, repeated_name, value)
        if name is not None:
            raise repeated_error(name)
        await self.take_turn_if_large(data)  # the caller validates the value
        return value

    async def take_turn_if_large(self, data: bytes | None = None) -> None:
        """Wait for another turn of the event loop for work on a large body, by default the
        request's: what comes next takes as long as what came before."""
        if (size := self._held if data is None else len(data)) > TURN_BYTES:
            await self._bodies.turns.take_turn(self.owner, size)

    def on_disconnect(self, act: Callable[[], None]) -> None:
        """Call `act` when the client disconnects, also while nothing is sent. The body must have
        been read. A second call replaces the first."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = asyncio.get_running_loop().create_task(self._watch(act))

    async def _watch(self, act: Callable[[], None]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        act()

    async def close(self) -> None:
        """End the request: release its held bytes, and stop watching the connection."""
        self._bodies.give_back(self._held, self.owner)
        self._held = 0
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher

    # response -------------------------------------------------------------------------------------

    async def respond(self, body: bytes, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = (JSON,)) -> None:
        await self._start(status, (*headers, (b"content-length", b"%d" % len(body))))
        await self.end(body)

    async def respond_pieces(self, pieces: AsyncIterator[bytes], size: int, headers: tuple[tuple[bytes, bytes], ...] = (JSON,)) -> None:
        """Send a response of `size` bytes; each piece is read when the one before was sent."""
        await self._start(200, (*headers, (b"content-length", b"%d" % size)))
        async for piece in pieces:
            await self.event(piece)
        await self.end()

    async def fail(self, error: ApiError) -> None:
        """Send the error as the response, or as the last event of the stream."""
        if self.started:
            await self.event(self.errors.events(error))
            await self.end()
            return
        headers = () if error.retry_after is None else ((b"retry-after", str(error.retry_after).encode()),)
        body = self.errors.body(error)
        await self._start(error.status, (JSON, *headers, *error.headers, (b"content-length", b"%d" % len(body))))
        await self.event(body)
        if error.headers == CLOSE and self._has_rest:
            await self._discard_rest()
        await self.end()

    async def _discard_rest(self) -> None:
        """Read on. To close with bytes unread would reset the connection, and a client that sends
        its whole body first would not see the response."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while (await self.receive()).get("more_body"):
                    pass

    async def start_events(self, media_type: bytes = EVENT_STREAM) -> None:
        await self._start(200, ((b"content-type", media_type), *UNBUFFERED))

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        await self.send_message({"type": "http.response.start", "status": status, "headers": headers})

    async def event(self, body: bytes) -> None:
        """Send the bytes of one or more server-sent events."""
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._put({"type": "http.response.body", "body": body})

    def _identity(self) -> list[tuple[bytes, bytes]]:
        headers = [*self.scope.get("response_headers", ())]
        if self.request_id:
            headers.append((HEADER, self.request_id.encode()))
            if self.errors.id_header is not None:
                headers.append((self.errors.id_header, self.request_id.encode()))
        # a generation that goes on after the response leaves its adapters in the scope
        if adapters := self.scope.get("adapters") if self.state is None else self.state.adapters:
            headers.append((ADAPTER, adapters.encode()))
        return [*headers, ignored_header(self.ignored)] if self.ignored else headers

    async def send_message(self, message: MutableMapping[str, Any]) -> None:
        """Send a message of another ASGI application, with this server's headers."""
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            headers = [*message.get("headers", ()), *self._identity()]
            if self.state is not None and (tell_blocks := self.scope.get("tell_blocks")) is not None:
                headers.append((BLOCKS, await tell_blocks(self.state)))
            message = {**message, "headers": headers}
        await self._put(message)

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        try:
            await self.send(message)
        except CLOSED as error:
            raise DisconnectedError from error

    def _too_large(self) -> ApiError:
        sentence = f"the body is larger than {self.max_body} bytes, which is all that this route takes; send less"
        return ApiError(413, sentence, headers=CLOSE)


async def run_unless_small(data: bytes, act: Callable[[bytes, T], R], argument: T) -> R:
    """`act` of a body, in a thread unless that takes little time."""
    return act(data, argument) if len(data) <= INLINE_BYTES else await asyncio.to_thread(act, data, argument)


def check_query(query: bytes, known: frozenset[str]) -> tuple[str, ...]:
    """The parameters of a query string that are ignored, as `query.NAME`. Raises ApiError 400 for
    one that cannot be decoded, and for a name that may not be ignored."""
    if query.count(b"&") >= MAX_PARAMETERS:
        raise ApiError(400, f"the query string has more than {MAX_PARAMETERS} parameters; send fewer")
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise ApiError(400, "the query string is not valid UTF-8; percent-encode the UTF-8 bytes of each value") from None
    if BAD_ESCAPE.search(query):
        raise ApiError(400, "the query string has a % that two hexadecimal digits do not follow; write %25 for a percent sign")
    unknown = list(dict.fromkeys(name for name, _ in pairs if name not in known and name not in SENT_TO_ALL))
    return tuple(f"query.{name}" for name in check_spelling(unknown, known, "query parameter"))
