"""Hostile clients of `/v1/realtime`, over sockets: frames and events that break the rules, floods,
clients that are half gone or do not read, and more sessions than there may be.

After each of them nothing is held, no session is open and another client is served.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from frame.entrypoints.http.realtime import connection, open_sessions, routes, transcription
from frame.entrypoints.http.realtime.connection import MAX_FRAGMENTS
from tests.entrypoints.inprocess import InProcess, serving
from tests.security.test_connections import HASTY, PATIENT, listening
from tests.tiny_whisper import make_whisper

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
HEAD = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
QUESTION: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    size = len(payload)
    head = bytes([fin << 7 | opcode]) + (
        bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack("!H", size) if size < 1 << 16 else b"\xff" + struct.pack("!Q", size)
    )
    return head + bytes(4) + payload  # a mask of zeros


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENT):
        while not condition():  # noqa: ASYNC110 - of another task, which has no event for it
            await asyncio.sleep(0.01)


class Client:
    """One connection; `send` takes an event or the bytes of frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""

    def send(self, *sent: Any) -> None:
        self.writer.write(b"".join(each if isinstance(each, bytes) else frame(TEXT, json.dumps(each).encode()) for each in sent))

    async def frame(self) -> tuple[int, bytes]:
        """The next frame, but for pings."""
        async with asyncio.timeout(PATIENT):
            while True:
                first, size = await self.reader.readexactly(2)
                if size >= 126:
                    width, form = (2, "!H") if size == 126 else (8, "!Q")
                    (size,) = struct.unpack(form, await self.reader.readexactly(width))
                payload = await self.reader.readexactly(size)
                if first & 15 != PING:
                    return first & 15, payload

    async def event(self) -> Any:
        opcode, payload = await self.frame()
        assert opcode == TEXT, (opcode, payload)
        return json.loads(payload)

    async def code(self) -> int:
        """The code of the close frame that comes, after anything else."""
        while (found := await self.frame())[0] != CLOSE:
            pass
        (code,) = struct.unpack("!H", found[1][:2])
        return int(code)

    async def error(self) -> Any:
        while (event := await self.event())["type"] != "error":
            pass
        return event["error"]


class Site:
    def __init__(self, server: InProcess, connect: Any) -> None:
        self.server, self._connect = server, connect

    async def dial(self, head: bytes = HEAD, after: bytes = b"") -> Client:
        client = Client(*await self._connect())
        client.writer.write(head + b"\r\n" + after)
        client.head = await client.reader.readuntil(b"\r\n\r\n")
        return client

    async def open(self, head: bytes = HEAD) -> Client:
        client = await self.dial(head)
        assert client.head.startswith(b"HTTP/1.1 101 "), client.head
        assert (await client.event())["type"] == "session.created"
        return client

    async def refusal(self, head: bytes, after: bytes = b"") -> tuple[int, Any]:
        client = await self.dial(head, after)
        size = int(client.head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(client.head[9:12]), json.loads(await client.reader.readexactly(size))["error"]

    async def settled(self) -> None:
        """Wait until no session is open and nothing is held."""
        services, bodies = self.server.services, self.server.app.bodies
        await until(lambda: not (services.realtime or services.client.num_outstanding or bodies.held))
        assert not bodies.held_by
        assert not services.realtime


@asynccontextmanager
async def site(
    sections: Mapping[str, Any] | None = None, folder: str | Path = "frame-tiny", seconds: float = PATIENT
) -> AsyncIterator[Site]:
    given = {**(sections or {}), "server": {"client_timeout": seconds, **(sections or {}).get("server", {})}}
    if folder != "frame-tiny":
        given["model"] = {"max_context": 128}
    async with serving(given, folder) as server, listening(server.app, seconds, connections=4000) as connect:
        made = Site(server, connect)
        yield made
        honest = await made.open(HEAD.replace(b"\r\nConnection", b"\r\nX-Api-Key: a\r\nConnection", 1))
        honest.send({"type": "unknown"})
        assert (await honest.error())["code"] == "unknown_event"
        honest.writer.close()
        await made.settled()


def cut(size: int) -> bytes:
    """The head of a frame of text of so many bytes, without them."""
    return b"\x81\xff" + struct.pack("!Q", size) + bytes(4)


async def test_the_handshake_names_query_parameters_without_effect() -> None:
    async with site() as here:
        for head, is_named in ((HEAD.replace(b"realtime", b"realtime?zork=1", 1), True), (HEAD, False)):
            client = await here.dial(head)
            assert (b"x-frame-ignored-fields: query.zork\r\n" in client.head.lower()) is is_named
            client.writer.close()


FRAMES: list[tuple[bytes, int]] = [
    (cut(1 << 40), 1009),
    (frame(TEXT, b"\xff\xfe"), 1007),
    (frame(BINARY, b"{}"), 1003),
    (b"\x81\x02{}", 1002),  # without a mask
    (frame(0, b"x"), 1002),  # the rest of no message
    (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
    (frame(3), 1002),  # a reserved opcode
    (frame(PING, bytes(126)), 1002),
    (b"\xc1" + frame(TEXT, b"{}")[1:], 1002),  # compressed, which was not agreed
    (frame(TEXT, b"{", fin=False) + frame(0, b"", fin=False) * (MAX_FRAGMENTS + 1), 1009),
    (frame(CLOSE, struct.pack("!H", 1000)), 1000),
    (frame(CLOSE, b"\x03"), 1002),
]


async def test_frames_that_break_the_rules() -> None:
    async with site() as made:
        for sent, code in FRAMES:
            client = await made.open()
            client.send(sent)
            assert await client.code() == code, sent[:40]
            assert await client.reader.read() == b""


EVENTS: list[tuple[bytes, str]] = [
    (b"{", "JSON"),
    (b"[]", "JSON object"),
    (b'{"type": "session.update", "type": "x"}', "twice"),
    (b"[" * 2000 + b"]" * 2000, "nested"),
    (b'{"type": "response.create", "event_id": 7}', "event_id"),
    (b'{"type": {"a": 1}, "event_id": {}}', "unknown"),
    (b'{"type": "session.update", "session": {"instructions": "\\ud800"}}', ""),
    (b'{"type": "session.update", "session": {"temperature": 1e999}}', ""),
    (b'{"type": "session.update", "session": {"seed": 123456789012345678901234567890}}', ""),
]


async def test_events_that_cannot_be_read() -> None:
    async with site() as made:
        client = await made.open()
        for sent, words in EVENTS:
            client.send(frame(TEXT, sent))
            assert words in (await client.error())["message"]
        client.send({"type": "conversation.item.create", "item": QUESTION})
        assert (await client.event())["type"] == "conversation.item.added"
        client.writer.close()


async def test_a_message_in_fragments_and_pings() -> None:
    async with site() as made:
        client = await made.open()
        data = json.dumps({"type": "conversation.item.create", "item": QUESTION}).encode()
        pieces = [frame(0 if start else TEXT, data[start : start + 1], fin=start == len(data) - 1) for start in range(len(data))]
        client.send(frame(PING, b"there?").join(pieces))
        for _ in range(len(data) - 1):
            assert await client.frame() == (PONG, b"there?")
        assert (await client.event())["type"] == "conversation.item.added"
        client.writer.close()


@pytest.mark.parametrize(
    "flood",
    [frame(PING) * 200_000, frame(TEXT, b"{}") * 200_000, (frame(TEXT, b"{", fin=False) + frame(0, b"", fin=False) * 1000) * 200],
    ids=["pings", "events", "fragments"],
)
async def test_a_flood_delays_no_other_session(flood: bytes) -> None:
    """Several sessions send as fast as they can; they are read more slowly."""
    async with site() as made:
        floods = [await made.open() for _ in range(4)]
        for client in floods:
            client.send(flood)
        other, delays = await made.open(), []
        for number in range(40):
            began = time.perf_counter()
            other.send({"type": "conversation.item.create", "item": {**QUESTION, "id": f"i{number}"}})
            assert [(await other.event())["type"] for _ in range(2)] == ["conversation.item.added", "conversation.item.done"]
            delays.append(time.perf_counter() - began)
        assert sorted(delays)[20] < 0.5
        for client in (*floods, other):
            client.writer.transport.abort()


async def test_a_flood_is_read_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BURST", 50)
    monkeypatch.setattr(connection, "FRAMES_A_SECOND", 400)
    async with site() as made:
        client = await made.open()
        began = time.perf_counter()
        client.send(frame(TEXT, b"{}") * 500)
        for _ in range(500):
            await client.error()
        assert time.perf_counter() - began > 0.5
        client.writer.close()


@pytest.mark.parametrize(
    "leave", [lambda w: w.write_eof(), lambda w: w.close(), lambda w: w.transport.abort()], ids=["half", "close", "reset"]
)
async def test_a_client_that_leaves_ends_its_response(leave: Callable[[asyncio.StreamWriter], None]) -> None:
    async with site({"cache": {"max_total_tokens": 4096}}) as made:
        client = await made.open()
        client.send({"type": "conversation.item.create", "item": QUESTION}, {"type": "response.create", "response": {"seed": 1}})
        while (await client.event())["type"] != "response.created":
            pass
        leave(client.writer)
        await made.settled()


async def test_a_client_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HIGH_WATER", 1024)
    async with site(seconds=HASTY) as made:
        client = await made.open()
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        item = {**QUESTION, "content": [{"type": "input_text", "text": "x" * 100_000}]}
        with suppress(ConnectionError):
            for number in range(200):
                client.send({"type": "conversation.item.create", "item": {**item, "id": str(number)}})
                client.send({"type": "conversation.item.retrieve", "item_id": str(number)})
                await client.writer.drain()
        await made.settled()


async def test_what_a_session_keeps_is_held() -> None:
    """Settings, items and audio count for the client, until the session ends; beyond its share an
    event is refused, and the session goes on."""
    async with site({"server": {"max_body_bytes": 1 << 20}}) as made:
        bodies, client = made.server.app.bodies, await made.open()
        before = bodies.held
        client.send({"type": "session.update", "session": {"instructions": "a" * 200_000}})
        assert (await client.event())["type"] == "session.updated"
        client.send({"type": "session.update", "session": {"instructions": "a" * 100_000}})
        assert (await client.event())["type"] == "session.updated"
        client.send({"type": "input_audio_buffer.clear"})
        await client.error()
        assert 100_000 < bodies.held - before < 101_000
        item = {**QUESTION, "content": [{"type": "input_text", "text": "x" * 500_000}]}
        codes = []
        for number in range(40):
            client.send({"type": "conversation.item.create", "item": {**item, "id": str(number)}})
            event = await client.event()
            if event["type"] == "error":
                codes.append(event["error"]["code"])
                break
            await client.event()
        assert codes == ["too_many_bytes_of_client"]
        client.send({"type": "conversation.item.delete", "item_id": "0"})
        assert (await client.event())["type"] == "conversation.item.deleted"
        client.writer.close()
        await made.settled()


async def test_what_a_response_reads_is_bounded() -> None:
    """Items count as often as an input refers to them: small events must not make a prompt that no
    body could have."""
    async with site({"server": {"max_body_bytes": 1 << 20}}) as made:
        client = await made.open()
        content = [{"type": "output_text", "text": "x" * 200_000}]
        parts = {**QUESTION, "id": "parts", "content": QUESTION["content"] * 1000}
        for item in ({"type": "message", "role": "assistant", "id": "long", "content": content}, parts):
            client.send({"type": "conversation.item.create", "item": item})
            assert [(await client.event())["type"] for _ in range(2)] == ["conversation.item.added", "conversation.item.done"]
        for name, count, sentence in (("long", 6, "bytes of items"), ("parts", 9, "9000 parts of messages"), ("parts", 4097, "4097 items")):
            references = [{"type": "item_reference", "id": name}] * count
            client.send({"type": "response.create", "response": {"input": references}})
            error = await client.error()
            assert (sentence in error["message"], error["param"]) == (True, "response.input")
        client.writer.close()


async def test_half_a_message_is_held() -> None:
    async with site() as made:
        clients = [await made.open() for _ in range(3)]
        for client in clients:
            client.send(cut(3 << 20) + bytes(2 << 20))
        await until(lambda: made.server.app.bodies.held >= 6 << 20)
        for client in clients:
            client.writer.close()


async def test_the_number_of_sessions_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    async with site({"server": {"max_connections": 40, "api_keys": str(tmp_path / "keys")}}) as made:
        heads = {key: HEAD + b"Authorization: Bearer " + key.encode() + b"\r\n" for key in "ab"}
        mine = [await made.open(heads["a"]) for _ in range(10)]
        status, error = await made.refusal(heads["a"])
        assert (status, error["code"]) == (429, "too_many_sessions_of_client")
        mine += [await made.open(heads["b"]) for _ in range(5)]
        assert (await made.refusal(heads["b"]))[0] == 429
        mine.pop().writer.close()
        await until(lambda: len(made.server.services.realtime or ()) == 14)
        mine.append(await made.open(heads["b"]))
        for client in mine:
            client.writer.close()
        await made.settled()


async def test_a_thousand_sessions() -> None:
    """Each of them is open, a response of one of them ends, and all leave at once."""
    async with site() as made:
        clients = await asyncio.gather(*(made.open() for _ in range(1000)))
        assert len(made.server.services.realtime or ()) == 1000
        one = clients[500]
        one.send({"type": "conversation.item.create", "item": QUESTION}, {"type": "response.create", "response": {"max_output_tokens": 2}})
        while (await one.event())["type"] != "response.done":
            pass
        for client in clients:
            client.writer.close()


async def test_a_key_may_run_as_many_responses_as_requests() -> None:
    async with site({"server": {"api_key": "a", "max_requests_per_key": 1}}) as made:
        head = HEAD + b"Authorization: Bearer a\r\n"
        one, two = await made.open(head), await made.open(head)  # idle sessions count as no request
        for client in (one, two):
            client.send({"type": "conversation.item.create", "item": QUESTION})
        one.send({"type": "response.create", "response": {"max_output_tokens": 300}})
        while (await one.event())["type"] != "response.created":
            pass
        two.send({"type": "response.create"})
        assert (await two.error())["code"] == "too_many_requests_of_key"
        for client in (one, two):
            client.writer.close()


async def test_a_removed_key_runs_no_response(tmp_path: Path) -> None:
    """Keys are read again while sessions are open."""
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    async with site({"server": {"api_keys": str(file)}}) as made:
        one, two = [await made.open(HEAD + b"Authorization: Bearer " + key + b"\r\n") for key in (b"a", b"b")]
        keys = made.server.services.keys
        assert keys is not None
        file.write_text("a\n")
        await keys.use_store(keys.make_store())
        for client in (one, two):
            client.send({"type": "conversation.item.create", "item": QUESTION})
            client.send({"type": "response.create", "response": {"max_output_tokens": 1}})
        assert (await two.error())["code"] == "invalid_api_key"
        while (await one.event())["type"] != "response.done":
            pass
        for client in (one, two):
            client.writer.close()


async def test_the_last_event_of_a_response_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next response begins while the client does not take the end of the one before."""
    taken, send = asyncio.Event(), connection.WebSocketConnection.send

    async def send_late(self: connection.WebSocketConnection, data: bytes) -> None:
        await send(self, data)
        if b'"type":"response.done"' in data:
            await taken.wait()

    async with site({"cache": {"max_total_tokens": 4096}}) as made:
        monkeypatch.setattr(connection.WebSocketConnection, "send", send_late)
        client = await made.open()
        client.send(
            {"type": "conversation.item.create", "item": QUESTION}, {"type": "response.create", "response": {"max_output_tokens": 1}}
        )
        while (await client.event())["type"] != "response.done":
            pass
        client.send({"type": "response.create", "response": {"seed": 1}})
        while (await client.event())["type"] != "response.created":
            pass
        taken.set()
        await asyncio.sleep(0.01)
        client.send({"type": "response.cancel"})
        while (event := await client.event())["type"] not in ("response.done", "error"):
            pass
        assert event["type"] == "response.done" and event["response"]["status"] == "cancelled", event
        client.writer.close()


HANDSHAKES: list[tuple[bytes, bytes, int, str]] = [
    (HEAD.replace(b"version: 13", b"version: 8").replace(b"Version: 13", b"Version: 8"), b"", 400, "must be 13"),
    (HEAD.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"x"), b"", 400, "sec-websocket-key"),
    (b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"", 400, "is a WebSocket"),
    (HEAD.replace(b"Upgrade: websocket", b"Upgrade: h2c"), b"", 400, "is a WebSocket"),
    (HEAD, frame(TEXT, b"{}"), 400, ""),
    (HEAD.replace(b"/v1/realtime", b"/v1/realtime?model=gpt-realtime"), b"", 404, "does not exist"),
    (HEAD.replace(b"/v1/realtime", b"/v1/realtime?intent=transcription"), b"", 400, "transcribes no audio"),
    (HEAD + b"Origin: https://evil.example\r\n", b"", 403, "a page of https://evil.example"),
]


async def test_handshakes_that_are_refused() -> None:
    async with site() as made:
        for head, after, status, words in HANDSHAKES:
            found, error = await made.refusal(head, after)
            assert found == status
            assert words in error["message"]


async def test_pages_need_an_allowed_origin_with_keys_too() -> None:
    async with site({"server": {"api_key": "a", "cors_origins": ["https://app.example"]}}) as made:
        head = HEAD + b"Authorization: Bearer a\r\n"
        assert (await made.refusal(HEAD))[0] == 401
        assert (await made.refusal(head + b"Origin: https://evil.example\r\n"))[0] == 403
        for origin in (b"https://app.example", b"http://127.0.0.1"):
            (await made.open(head + b"Origin: " + origin + b"\r\n")).writer.close()


async def test_idle_and_old_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as made:
        client = await made.open()
        monkeypatch.setattr(open_sessions, "IDLE_SECONDS", 0.0)
        assert await client.code() == 1001
        monkeypatch.setattr(open_sessions, "IDLE_SECONDS", 600.0)
        client = await made.open()
        monkeypatch.setattr(open_sessions, "MAX_SECONDS", 0.0)
        assert await client.code() == 1001
        monkeypatch.setattr(open_sessions, "MAX_SECONDS", 600.0)


async def test_a_client_that_answers_no_ping_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL", 0.05)
    async with site() as made:
        client = await made.open()  # it never answers
        with suppress(ConnectionError):
            await client.reader.read()
        await made.settled()
        monkeypatch.setattr(connection, "PING_INTERVAL", 20.0)


async def test_a_server_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as made:
        with monkeypatch.context() as patch:
            patch.setattr(routes, "is_installed", lambda name: False)
            status, error = await made.refusal(HEAD)
        assert (status, error["code"]) == (400, "not_installed")
        assert "install 'websockets" in error["message"]


# audio --------------------------------------------------------------------------------------------


async def test_audio_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcription, "MAX_BUFFER", 100_000)
    async with site(folder=make_whisper(tmp_path)) as made:
        client = await made.open()
        append = {"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(60_000)).decode()}
        client.send(append, append)
        assert (await client.error())["code"] == "buffer_full"
        assert made.server.app.bodies.held >= 60_000
        client.send(*[{"type": "input_audio_buffer.append", "audio": "AAA="}] * 200, {"type": "unknown"})
        await client.error()
        (session,) = made.server.services.realtime._sessions  # type: ignore[union-attr]
        assert len(session._buffer._pieces) == 2  # type: ignore[attr-defined]  # an object of its own for each would take more than its bytes
        client.send({"type": "input_audio_buffer.commit"})
        assert (await client.event())["type"] == "input_audio_buffer.committed"
        client.writer.close()
