"""Writing from the client's own pass: nothing is lost or reordered when a connection is full,
fails, or hangs up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.errors import DisconnectedError
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.stream_writer import EventPump


class Connection:
    """An ASGI `send` that can be full or broken."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()
        self.broken: type[Exception] | None = None

    async def send(self, message: Any) -> None:
        await self.room.wait() if not self.room.is_set() else None
        if self.broken:
            raise self.broken("gone")
        self.bodies.append(message["body"])


async def never() -> Any:
    await asyncio.Event().wait()


def make() -> tuple[Connection, RequestState, SequenceState, EventPump]:
    connection, reply = Connection(), RequestState()
    stream = SequenceState(reply, 0, 0, "r", [1], SamplingParams())
    reply.sequences.append(stream)
    reply.num_unfinished = 1
    call = RequestContext({"headers": []}, never, connection.send, 0)
    return connection, reply, stream, EventPump(call, reply, lambda s: s.take_output()[0].encode())


def feed(stream: SequenceState, text: str, finish: Finish | None = None) -> None:
    stream.texts.append(text)
    if finish is not None:
        stream.finish = finish
        stream.request.num_unfinished -= 1
    if stream not in stream.request.changed:
        stream.request.changed.append(stream)
    stream.request.notify()


async def test_news_are_written_at_once() -> None:
    connection, _, stream, pump = make()
    stream.texts.append("a")
    running = asyncio.create_task(pump.run([stream]))
    await asyncio.sleep(0)
    feed(stream, "b")
    assert connection.bodies == [b"a", b"b"]  # no task had to run in between
    feed(stream, "c", Finish("stop"))
    await running
    assert connection.bodies == [b"a", b"b", b"c"]


async def test_a_full_connection_joins_what_comes_meanwhile() -> None:
    connection, _, stream, pump = make()
    running = asyncio.create_task(pump.run([]))
    await asyncio.sleep(0)
    connection.room.clear()
    for text in "abc":
        feed(stream, text)
    feed(stream, "d", Finish("stop"))
    await asyncio.sleep(0.01)
    assert connection.bodies == []
    assert not running.done()
    connection.room.set()
    await running
    assert connection.bodies == [b"a", b"bcd"]


@pytest.mark.parametrize("error", [ConnectionResetError, RuntimeError])
async def test_a_broken_connection_is_the_handler_s_error(error: type[Exception]) -> None:
    connection, _, stream, pump = make()
    running = asyncio.create_task(pump.run([]))
    await asyncio.sleep(0)
    connection.broken = error
    feed(stream, "a")
    with pytest.raises(DisconnectedError):
        await running
    feed(stream, "b")  # the response is closed
    assert connection.bodies == []


async def test_a_pump_that_is_given_up_raises_why_and_writes_no_more() -> None:
    connection, _, stream, pump = make()
    running = asyncio.create_task(pump.run([]))
    await asyncio.sleep(0)
    feed(stream, "a")
    connection.room.clear()
    feed(stream, "b")
    await asyncio.sleep(0)
    pump.abort(OverflowError("too much waits"))
    feed(stream, "c")  # what still comes harms nothing
    with pytest.raises(OverflowError):
        await running
    connection.room.set()
    await asyncio.sleep(0)
    assert connection.bodies == [b"a"]
    _, _, stream, pump = make()
    pump.abort(OverflowError("too much waits"))
    with pytest.raises(OverflowError):
        await pump.run([stream])


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_hang_up_ends_the_pump(is_full: bool) -> None:
    connection, reply, stream, pump = make()
    running = asyncio.create_task(pump.run([]))
    await asyncio.sleep(0)
    if is_full:
        connection.room.clear()
        feed(stream, "a")
        await asyncio.sleep(0)
        reply.mark_disconnected()
        connection.room.set()
    else:
        reply.mark_disconnected()
    await asyncio.wait_for(running, 1.0)
    assert reply.on_update is None


async def test_an_error_while_writing_reaches_the_handler() -> None:
    _, reply, stream, _ = make()

    def fail(stream: SequenceState) -> bytes:
        raise KeyError("no such token")

    call = RequestContext({"headers": []}, never, Connection().send, 0)
    with pytest.raises(KeyError):
        await EventPump(call, reply, fail).run([stream])
