"""`EventPump`: writes the new output of a streamed response to its connection, within the engine
client's pass over a step's tokens.

To wake a task for every token of every stream would cost as much as the writing itself. A task
waits only while a connection is full; output that arrives meanwhile is joined into one event. Must
not depend on a dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from functools import partial
from types import coroutine
from typing import Any

from frame.entrypoints.engine_client.quotas import FairSemaphore
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.errors import DisconnectedError
from frame.entrypoints.http.paced_json import Event, collect_pieces, each_piece, join_events
from frame.entrypoints.http.request_context import CLOSED, RequestContext

MAX_UNREAD = 1024  # tokens and alternatives that are written as soon as the connection takes them


class EventPump:
    """One streamed response, from its first output to its last."""

    __slots__ = ("_call", "_done", "_state", "_turns", "_waiting", "_write")

    def __init__(
        self, call: RequestContext, state: RequestState, write: Callable[[SequenceState], Event], turns: FairSemaphore | None = None
    ) -> None:
        self._call = call
        self._state = state
        self._write = write
        self._turns = turns or FairSemaphore(1)  # the place of large output
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: asyncio.Task[None] | None = None  # writes to a full connection

    async def run(self, changed: Sequence[SequenceState]) -> None:
        """Write `changed` and all later output until the end. Raises what writing raises."""
        self._state.on_update, self._state.is_answered = self._push, True
        try:
            if not self._done.done():
                self._send(changed)
            await self._done
        finally:
            self._state.on_update = None
            if self._waiting is not None:
                self._waiting.cancel()

    def abort(self, error: Exception) -> None:
        """End the response with this error; output that was not written is dropped."""
        if not self._done.done():
            self._done.set_exception(error)

    def _push(self) -> None:
        """Write new output, unless the connection is full."""
        if self._waiting is None and not self._done.done():
            self._send(self._state.take_changed())

    def _send(self, changed: Sequence[SequenceState]) -> None:
        sending: Any = None
        try:
            if self._call.recorder is not None:
                self._call.recorder.note(changed)
            body = join_events([self._write(sequence) for sequence in changed])
            if not isinstance(body, bytes):
                self._waiting = asyncio.get_running_loop().create_task(self._finish(partial(self._send_steps, body)))
                return
            if body and not self._state.is_disconnected:
                sending = self._call.send({"type": "http.response.body", "body": body, "more_body": True})
                try:
                    first = sending.send(None)  # runs to its end, unless it has to wait
                except StopIteration:
                    pass
                else:
                    self._waiting = asyncio.get_running_loop().create_task(self._finish(partial(_resume, sending, first)))
                    return
        except Exception as error:  # noqa: BLE001 - raised again in `run`, whose request it concerns
            if sending is not None and isinstance(error, CLOSED):
                error = DisconnectedError()
            self._done.set_exception(error)
            return
        if self._state.is_disconnected or not (self._state.num_unfinished or self._state.changed):
            self._done.set_result(None)

    async def _send_steps(self, steps: Iterator[bytes]) -> None:
        """Send output that is made in steps. Raises DisconnectedError."""
        pieces = await collect_pieces(self._turns, self._call.tenant, steps, lambda: self._state.is_disconnected)
        if self._call.recorder is not None:  # a record and its events are one frame
            pieces = [b"".join(pieces)]
        async for piece in each_piece(pieces):
            await self._call.event(piece)

    async def _finish(self, send: Callable[[], Awaitable[None]]) -> None:
        """Wait until the connection takes more, then write the output that arrived meanwhile."""
        try:
            await send()
            if self._state.num_unread > MAX_UNREAD:  # many streams may be read again at once
                async with self._turns.hold_slot(self._call.tenant):
                    await asyncio.sleep(0)
                    self._write_rest()
                return
        except Exception as error:  # noqa: BLE001 - as above
            if isinstance(error, CLOSED):
                error = DisconnectedError()
            if not self._done.done():
                self._done.set_exception(error)
            return
        self._write_rest()

    def _write_rest(self) -> None:
        self._waiting = None
        if not self._done.done():
            self._send(self._state.take_changed())


@coroutine
def _resume(started: Coroutine[Any, Any, None], first: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was run up to its first wait, which is for `first`."""
    try:
        yield first
    except BaseException:  # cancellation too
        started.close()
        raise
    yield from started  # type: ignore[misc]
