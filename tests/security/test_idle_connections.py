"""Idle connections do not keep others out, memory of bodies is returned, and frequent reading of
what is expensive to render does not block the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from frame.entrypoints.engine_client import stats
from frame.entrypoints.http import app as http_app
from frame.entrypoints.http.protocol import bodies as protocol_bodies
from frame.entrypoints.http.protocol import connections
from frame.entrypoints.http.protocol.bodies import Bodies
from frame.entrypoints.http.protocol.paced_parsing import ParsingQueue
from frame.interfaces.stats import RenderedMetrics, StatLogger
from tests.entrypoints.inprocess import serving
from tests.security.test_connections import WAIT, listening, tell

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_a_new_connection_replaces_the_one_that_is_idle_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a request and after one. Those with a part of a request keep their place."""
    monkeypatch.setattr(connections, "MIN_IDLE", 0.1)
    async with listening(tell, connections=3) as connect, asyncio.timeout(WAIT):
        fresh, _ = await connect()
        used, writer = await connect()
        writer.write(REQUEST)
        assert (await used.readline()).startswith(b"HTTP/1.1 200")
        begun, begun_writer = await connect()
        begun_writer.write(REQUEST[:10])
        early, _ = await connect()
        assert (await early.readline()).startswith(b"HTTP/1.1 503"), "nothing has been idle for long"
        await asyncio.sleep(0.2)
        for idle in (fresh, used):
            reader, writer = await connect()
            await idle.read()  # the server has closed it
            writer.write(REQUEST)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        begun_writer.write(REQUEST[10:])
        assert (await begun.readline()).startswith(b"HTTP/1.1 200")


async def test_a_connection_whose_bytes_wait_to_be_parsed_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_IDLE", 0.0)
    async with listening(tell, connections=1) as connect, asyncio.timeout(WAIT):
        waiting: asyncio.Queue[Any] = asyncio.Queue()
        with monkeypatch.context() as patch:
            patch.setattr(ParsingQueue, "is_open", lambda self: False)
            patch.setattr(ParsingQueue, "add", lambda self, connection, *, is_first: waiting.put_nowait(connection))
            first, writer = await connect()
            writer.write(REQUEST)
            held = await waiting.get()
            second, _ = await connect()
            assert (await second.readline()).startswith(b"HTTP/1.1 503")
        held.parse_portion()
        assert (await first.readline()).startswith(b"HTTP/1.1 200")


def test_metrics_are_rendered_in_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RENDER_BURST", 0.0)

    class Slow:
        count = 0

        def render_metrics(self) -> RenderedMetrics:
            self.count += 1
            time.sleep(0.01)
            return RenderedMetrics("text/plain", b"%d" % self.count)

    logger = Slow()
    loggers = stats.StatLoggers("model", {"slow": cast("StatLogger", logger)}, lambda: None)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        rendered = loggers.render_metrics()
    assert rendered is not None and rendered.body == b"%d" % logger.count
    assert 2 <= logger.count <= 6


async def test_the_description_is_built_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    build, released = http_app.get_openapi, threading.Event()

    def build_slowly(**keywords: Any) -> Any:
        assert released.wait(20), "the event loop waits for the description"
        return build(**keywords)

    monkeypatch.setattr(http_app, "get_openapi", build_slowly)
    async with serving() as server:
        asked = [asyncio.create_task(server.request("GET", "/openapi.json")) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert (await server.request("GET", "/health")).status == 200
        assert not asked[0].done()
        released.set()
        assert {(await each).status for each in asked} == {200}


async def test_one_thread_turns_many_ids_into_text(monkeypatch: pytest.MonkeyPatch) -> None:
    running, maximum = [0], [0]

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        running[0] += 1
        maximum[0] = max(maximum[0], running[0])
        time.sleep(0.02)
        running[0] -= 1
        return "x"

    async with serving() as server:
        monkeypatch.setattr(server.services, "tokenizer", SimpleNamespace(decode=decode))
        bodies = [server.post("/detokenize", {"tokens": [5] * 2000}) for _ in range(8)]
        assert [each.json()["text"] for each in await asyncio.gather(*bodies)] == ["x"] * 8
    assert maximum == [1]


async def test_memory_of_many_bodies_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last of several waves, because returning it stops the server."""
    returned = threading.Semaphore(0)
    monkeypatch.setattr(protocol_bodies, "return_freed_memory", returned.release)
    monkeypatch.setattr(protocol_bodies, "TRIM_DELAY", 0.1)
    held = Bodies(maximum=4 * protocol_bodies.TRIM_BYTES, pause=1.0)
    for size, expected in ((protocol_bodies.TRIM_BYTES // 2, False), (protocol_bodies.TRIM_BYTES, True)):
        for _ in range(5):
            held.take(size, "one")
            held.give_back(size, "one")
        await asyncio.sleep(0.2)
        assert await asyncio.to_thread(returned.acquire, timeout=WAIT if expected else 0.05) == expected
    assert not returned.acquire(blocking=False)
