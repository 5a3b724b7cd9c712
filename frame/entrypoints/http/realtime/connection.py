"""`WebSocketConnection`: messages over a connection that an HTTP request has handed over, with
limits on the size of a message, on frames a second, and on a client that does not read.

`websockets` reads and writes frames, without compression. Used by the route. Must not know an event
or a session.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from websockets.exceptions import ProtocolError
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN, SERVER, Protocol

from frame.entrypoints.http.errors import ApiError, DisconnectedError
from frame.entrypoints.http.protocol.connections import Successor

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455, section 1.3
FIRST_SLICE, LARGEST_SLICE = 1024, 16 * 1024  # bytes that are parsed in one turn of the event loop
FEW_FRAMES = 8  # of a slice, after which the next one is larger
FRAMES_A_SECOND, MAX_BURST = 200, 1000  # frames beyond them wait, and the connection is not read
MAX_FRAGMENTS = 1024  # of a message
PING_INTERVAL = 20.0  # seconds; a client that has not answered the ping before is gone
CLOSE_TIMEOUT = 2.0  # seconds for the client's close frame, and for what was not sent
MAX_REASON = 120  # bytes of a close frame's reason
HIGH_WATER = 64 * 1024  # bytes that wait to be sent, beyond which writers wait
UNSUPPORTED, INVALID_TEXT, TOO_LARGE, TRY_LATER = 1003, 1007, 1009, 1013  # close codes

Hold = Callable[[int], None]  # counts bytes as held, or with a negative number gives them back; raises ApiError


@dataclass(slots=True)
class Received:
    """What has come and was not handled. Bytes from `position` on are not parsed."""

    data: bytes = b""
    position: int = 0
    slice: int = FIRST_SLICE  # bytes that are parsed next
    partial: int = 0  # bytes of a frame that is not complete
    fragments: list[bytes] = field(default_factory=list)
    messages: deque[bytes] = field(default_factory=deque)
    current: int = 0  # bytes of the message that is being handled

    @property
    def has_rest(self) -> bool:
        return self.position < len(self.data)

    @property
    def size(self) -> int:
        """Bytes that count as held, beside those that are not parsed."""
        return self.partial + sum(map(len, self.fragments)) + sum(map(len, self.messages)) + self.current

    def take_slice(self) -> bytes:
        piece = self.data[self.position : self.position + self.slice]
        self.position += len(piece)
        if not self.has_rest:
            self.data, self.position = b"", 0
        return piece

    def count_frames(self, num_frames: int, size: int) -> None:
        """A slice of so many bytes had these frames."""
        self.partial = 0 if num_frames else self.partial + size
        self.slice = min(LARGEST_SLICE, 2 * self.slice) if num_frames <= FEW_FRAMES else FIRST_SLICE


class FrameBudget:
    """How many frames may come now. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left, self._at = float(MAX_BURST), clock()

    def take(self, frames: int) -> float:
        """Count frames; -> seconds until one more may come."""
        now = self._clock()
        self._left = min(MAX_BURST, self._left + (now - self._at) * FRAMES_A_SECOND) - frames
        self._at = now
        return max(0.0, -self._left / FRAMES_A_SECOND)


class WebSocketConnection(Successor):
    """One connection, from its handshake on. `max_message`: bytes. `patience`: seconds for a client
    that does not read. `hold`: see `Hold`; messages count until the next one is received."""

    def __init__(self, max_message: int, patience: float, hold: Hold) -> None:
        self._protocol = Protocol(SERVER, state=OPEN, max_size=max_message)
        self._patience, self._hold = patience, hold
        self._loop = asyncio.get_running_loop()
        self._received, self._held = Received(), 0
        self._budget = FrameBudget(self._loop.time)
        self._parsing: asyncio.Handle | None = None  # the next slice
        self._waiter: asyncio.Future[None] | None = None  # of `receive`
        self._writable = asyncio.Event()
        self._writable.set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_answered = True  # the last ping
        self.is_over = False

    def start(self, transport: asyncio.Transport, key: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer the handshake with this `sec-websocket-key`."""
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)
        accept = base64.b64encode(hashlib.sha1(key.encode("latin-1") + GUID, usedforsecurity=False).digest())
        head = [b"HTTP/1.1 101 Switching Protocols", b"upgrade: websocket", b"connection: Upgrade", b"sec-websocket-accept: " + accept]
        transport.write(b"\r\n".join([*head, *(name + b": " + value for name, value in headers), b"\r\n"]))
        self._set_timer("ping", PING_INTERVAL, self._ping)

    # the client's side ----------------------------------------------------------------------------

    async def receive(self) -> bytes:
        """The next message, which is UTF-8. Raises DisconnectedError after the end."""
        received = self._received
        received.current = 0
        while not received.messages:
            if self.is_over:
                raise DisconnectedError
            self._read_on()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = received.messages.popleft()
        received.current = len(message)
        return message

    def data_received(self, data: bytes) -> None:
        if not self.is_over:
            self._received.data = self._received.data[self._received.position :] + data
            self._received.position = 0
            self._read_on()

    def _read_on(self) -> None:
        """Parse what has come, in a turn of its own, unless a message or the client's reading is
        waited for. The transport reads only when nothing is left."""
        if self.is_over or self._parsing is not None or self._transport.is_closing():
            return
        self._count_held()
        if self.is_over:
            return
        received, is_free = self._received, not self._received.messages and self._writable.is_set()
        if received.has_rest or not is_free:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        if received.has_rest and is_free:
            wait = self._budget.take(0)
            self._parsing = self._loop.call_later(wait, self._parse) if wait else self._loop.call_soon(self._parse)

    def _parse(self) -> None:
        self._parsing = None
        if self.is_over:
            return
        piece = self._received.take_slice()
        self._protocol.receive_data(piece)
        frames = self._protocol.events_received()
        self._received.count_frames(len(frames), len(piece))
        self._budget.take(len(frames))
        for frame in frames:
            if isinstance(frame, Frame) and not self.is_over:
                self._take_frame(frame)
        self._flush()
        if self._protocol.parser_exc is not None or self._protocol.close_rcvd is not None:
            self._end()
        self._read_on()

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._is_answered = True
        elif frame.opcode is Opcode.BINARY:
            self.close(UNSUPPORTED, "send events as text")
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT):
            fragments = self._received.fragments
            fragments.append(bytes(frame.data))
            if len(fragments) > MAX_FRAGMENTS:
                self.close(TOO_LARGE, f"a message may have {MAX_FRAGMENTS} fragments")
            elif frame.fin:
                message = b"".join(fragments)
                fragments.clear()
                try:
                    message.decode()
                except UnicodeDecodeError:
                    self.close(INVALID_TEXT, "the message is not valid UTF-8")
                else:
                    self._received.messages.append(message)
                    self._wake()

    def _count_held(self) -> None:
        size = self._received.size
        try:
            self._hold(size - self._held)
            self._held = size
        except ApiError as error:
            self.close(TRY_LATER, error.message)

    # the server's side ----------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        """Send a message of UTF-8; return when the client takes more. Raises DisconnectedError."""
        if self.is_over:
            raise DisconnectedError
        self._protocol.send_text(data)
        self._flush()
        await self._writable.wait()
        if self.is_over:
            raise DisconnectedError

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Send a close frame, and end the connection when the client has answered or some time has
        passed. A second call does nothing."""
        if not self.is_over:
            with suppress(ProtocolError):
                self._protocol.fail(code, reason.encode()[:MAX_REASON].decode("utf-8", "ignore"))
            self._flush()
            self._end()

    def _flush(self) -> None:
        if output := b"".join(self._protocol.data_to_send()):
            self._transport.write(output)

    def _ping(self) -> None:
        """Ask whether the client is there. One whose messages wait here is."""
        has_rest = bool(self._received.messages) or self._received.has_rest or self._parsing is not None
        if not self._is_answered and not has_rest:
            self._transport.abort()
            return
        if not has_rest:
            self._is_answered = False
            self._protocol.send_ping(b"")
            self._flush()
        self._set_timer("ping", PING_INTERVAL, self._ping)

    def pause_writing(self) -> None:
        self._writable.clear()
        self._set_timer("write", self._patience, self._transport.abort)

    def resume_writing(self) -> None:
        self._stop_timer("write")
        self._writable.set()
        self._read_on()

    # the end --------------------------------------------------------------------------------------

    def _end(self) -> None:
        """No message comes any more. What was written is sent, within `CLOSE_TIMEOUT`."""
        if self.is_over:
            return
        self.is_over = True
        self._received = Received()
        self._hold(-self._held)
        self._held = 0
        self._stop_timer("ping")
        self._writable.set()
        self._wake()
        if not self._transport.is_closing():
            self._transport.resume_reading()  # what comes is dropped: bytes that were not read would reset the connection
            if self._transport.can_write_eof():
                with suppress(OSError):
                    self._transport.write_eof()
            self._set_timer("close", CLOSE_TIMEOUT, self._transport.abort)

    def eof_received(self) -> bool:
        """A client that sends no more takes part in no session."""
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        for timer in list(self._timers):
            self._stop_timer(timer)
        super().connection_lost(exc)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_timer(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        self._stop_timer(name)
        self._timers[name] = self._loop.call_later(seconds, act)

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
