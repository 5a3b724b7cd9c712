"""Streams that a server continues: from every event on, the answer is that of a server that made
all of it; and what no server may be asked to continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from frame.core.errors import ConfigurationError
from frame.core.messages import TokenLogprobs
from frame.entrypoints import handoff
from frame.entrypoints.handoff import (
    EVENTS,
    HEADER,
    START,
    FleetKey,
    FrameReader,
    SealedHandoff,
    Signature,
    StreamStart,
    Write,
    read_fleet_key,
)
from frame.entrypoints.http.protocol import continuation
from frame.entrypoints.http.protocol.continuation import Fleet, identify
from frame.entrypoints.http.server import load_parsers
from frame.plugins.loader import load_registry
from frame.testing.fake_runner import FakeRunner
from tests.entrypoints.inprocess import JSON_TYPE, InProcess, Response, serving
from tests.entrypoints.router.fleet import Stream, make_streams

KEY = "the key of this fleet"
Frame = tuple[int, bytes, bytes]


@asynccontextmanager
async def member(key: str = KEY, sections: dict[str, Any] | None = None) -> AsyncIterator[InProcess]:
    """A server with a fleet key."""
    async with serving(sections or {}) as server:
        services = server.services
        services.fleet = Fleet(FleetKey(key), services.resolved, services.tokenizer)
        for attribute, parser in load_parsers(services.resolved, load_registry()).items():
            setattr(services, attribute, parser)
        yield server


@pytest.fixture
def _paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes so long that each has an event of its own."""
    launch = FakeRunner.launch

    def paced(runner: FakeRunner, batch: Any) -> Any:
        time.sleep(0.002)
        return launch(runner, batch)

    monkeypatch.setattr(FakeRunner, "launch", paced)


async def ask(server: InProcess, stream: Stream, value: bytes, body: bytes) -> Response:
    return await server.request("POST", stream.path, body, (JSON_TYPE, (HEADER, value), (b"content-length", str(len(body)).encode())))


async def read_frames(server: InProcess, stream: Stream) -> list[Frame]:
    reply = await ask(server, stream, FleetKey(KEY).sign(stream.path), msgspec.json.encode(stream.body))
    assert reply.status == 200, reply.body
    assert reply.headers[HEADER.decode()] == "1"
    return list(FrameReader().feed(reply.body))


def seal(server: InProcess, frames: list[Frame], **changed: Any) -> bytes:
    """The handoff of a stream of which these frames came."""
    assert server.services.fleet is not None
    fields: dict[str, Any] = {"version": 1, "identity": server.services.fleet.identity, "age": 0.1}
    records = [msgspec.Raw(record) for kind, record, _ in frames if kind == EVENTS]
    return msgspec.msgpack.encode(
        SealedHandoff(**(fields | {"start": msgspec.Raw(frames[0][1]), "records": msgspec.Raw(msgspec.msgpack.encode(records))} | changed))
    )


async def move(server: InProcess, stream: Stream, sealed: bytes, target: str | None = None) -> Response:
    assert server.services.fleet is not None
    body = msgspec.json.encode(stream.body)
    instance = server.services.fleet.instance if target is None else target
    return await ask(server, stream, FleetKey(KEY).sign(stream.path, instance, sealed, body), sealed + body)


def events_of(frames: list[Frame]) -> bytes:
    return b"".join(body for _, _, body in frames)


@pytest.mark.slow
@pytest.mark.usefixtures("_paced")
@pytest.mark.parametrize("number", range(15))
async def test_a_stream_continues_from_each_of_its_events(number: int) -> None:
    """Two servers; the second one has none of the first one's state. The seeds are the first
    one's choice."""
    stream = make_streams(15, 24)[number]
    stream.body["model"] = ""
    for fields in (stream.body, stream.body.get("sampling_params", {}), stream.body.get("options", {})):
        for name in ("seed", "sampling_seed"):
            fields.pop(name, None)
    async with member() as first, member() as second:
        frames = await read_frames(first, stream)
        assert frames[0][0] == START and sum(kind == EVENTS for kind, _, _ in frames) >= 8
        whole = stream.with_bytes(events_of(frames)).content
        assert "error" not in whole
        for cut in range(1, len(frames) + 1, 3 if len(frames) > 20 else 1):
            reply = await move(second, stream, seal(second, frames[:cut]))
            assert reply.status == 200, reply.body
            rest = list(FrameReader().feed(reply.body))
            assert stream.with_bytes(events_of(frames[:cut]) + events_of(rest)).content == whole, cut
        assert second.services.client.num_outstanding == 0


@pytest.mark.usefixtures("_paced")
async def test_a_continued_stream_keeps_its_fingerprint() -> None:
    stream = next(each for each in make_streams(15, 24) if each.path == "/v1/chat/completions")
    async with member() as first, member(sections={"scheduler": {"max_queued_requests": 77}}) as second:
        assert first.services.fingerprint != second.services.fingerprint
        frames = await read_frames(first, stream)
        rest = list(FrameReader().feed((await move(second, stream, seal(second, frames[:5]))).body))
        for events in (events_of(frames[:5]), events_of(rest)):
            assert first.services.fingerprint.encode() in events
            assert second.services.fingerprint.encode() not in events


@pytest.mark.usefixtures("_paced")
async def test_a_continued_stream_moves_again() -> None:
    stream = make_streams(15, 40)[2]
    async with member() as first, member() as second, member() as third:
        frames = await read_frames(first, stream)
        begun = frames[:9]
        rest = list(FrameReader().feed((await move(second, stream, seal(second, begun))).body))
        begun += rest[1:9]
        rest = list(FrameReader().feed((await move(third, stream, seal(third, begun))).body))
        whole = stream.with_bytes(events_of(frames)).content
        assert stream.with_bytes(events_of(begun) + events_of(rest)).content == whole


async def test_only_the_router_is_answered() -> None:
    """A header that is forged, replayed, for another process or path, newer, cut or late is refused
    by name, and a server without a key refuses all."""
    stream = make_streams(15, 24)[0]
    body, key = msgspec.json.encode(stream.body), FleetKey(KEY)
    async with member() as server, serving({}) as plain:
        fleet = server.services.fleet
        assert fleet is not None
        frames = await read_frames(server, stream)
        sealed = seal(server, frames[:5])
        good = key.sign(stream.path, fleet.instance, sealed, body)
        version, nonce, expires, length, code = good.decode().split(".")
        now = int(expires)

        def forge(**changed: Any) -> bytes:
            parts = {"version": version, "nonce": nonce, "expires": expires, "length": length, "code": code} | changed
            return ".".join(map(str, parts.values())).encode()

        refused: list[tuple[bytes, bytes, int, str]] = [
            (b"1", body, 400, "x-frame-handoff"),
            (b"\xff.\xff", body, 400, "x-frame-handoff"),
            (forge(length=0), body, 403, "x-frame-handoff"),
            (forge(code="0" * 64), sealed + body, 403, "fleet key"),
            (forge(code=""), sealed + body, 403, "fleet key"),
            (forge(version=2), sealed + body, 409, "version 2"),
            (forge(expires=now + 1), sealed + body, 403, "fleet key"),
            (forge(expires=now - 200), sealed + body, 403, "expired"),
            (forge(expires=now + 9000), sealed + body, 403, "expired"),
            (forge(length=-1), sealed + body, 400, "bytes"),
            (forge(length=1 << 40), sealed + body, 400, "bytes"),
            (forge(length=len(sealed) + len(body) + 1), sealed + body, 400, "cut off"),
            (good, sealed + body.replace(b"Count", b"Sount"), 403, "fleet key"),
            (good, sealed[:-1] + b"\x00" + body, 403, "fleet key"),
            (FleetKey("the key of another fleet").sign(stream.path), body, 403, "fleet key"),
            (key.sign("/v1/completions"), body, 403, "fleet key"),
            (key.sign(stream.path, "another process", sealed, body), sealed + body, 403, "process"),
        ]
        wrong = sealed.replace(fleet.identity.encode(), b"\xff" * 32)  # signed, of a router that is at fault
        refused.append((key.sign(stream.path, fleet.instance, wrong, body), wrong + body, 400, "cannot be read"))
        for value, sent, status, words in refused:
            reply = await ask(server, stream, value, sent)
            assert (reply.status, words in reply.json()["error"]["message"]) == (status, True), (value, reply.body)
        assert (await ask(server, stream, good, sealed + body)).status == 200
        again = await ask(server, stream, good, sealed + body)
        assert (again.status, "twice" in again.json()["error"]["message"]) == (409, True)
        alone = await ask(plain, stream, key.sign(stream.path), body)
        assert (alone.status, "FRAME_FLEET_KEY" in alone.json()["error"]["message"]) == (403, True)
        assert server.services.client.num_outstanding == 0


async def test_another_model_prompt_weights_or_shape_is_refused() -> None:
    stream = make_streams(15, 24)[0]
    async with member() as server:
        frames = await read_frames(server, stream)
        start = msgspec.msgpack.decode(frames[0][1], type=StreamStart)

        def started(**changed: Any) -> msgspec.Raw:
            return msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(start, **changed)))

        def record(*ids: int, **changed: Any) -> list[msgspec.Raw]:
            return [msgspec.Raw(msgspec.msgpack.encode([Write(**({"index": 0, "token_ids": list(ids), "cached": 0} | changed))]))]

        listed = TokenLogprobs([1], [-0.5], [[(1, -0.5), (1 << 31, -1.0)]])
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({"identity": "0" * 32}, 409, "another checkpoint"),
            ({"version": 2}, 409, "version 2"),
            ({"start": started(digest=b"0" * 16)}, 409, "token ids"),
            ({"start": started(weight_version="step-7")}, 409, "weights"),
            ({"start": started(seeds=[1, 2])}, 400, "sequences"),
            ({"records": record(1, index=3)}, 400, "sequences"),
            ({"records": record(1 << 31)}, 400, "a token id outside the vocabulary (0 to "),
            ({"records": record(-1)}, 400, "vocabulary"),
            ({"records": record(1, 1 << 62)}, 400, "vocabulary"),
            ({"records": record(1, logprobs=[listed])}, 400, "vocabulary"),
            ({"records": record(1, prompt_logprobs=listed)}, 400, "vocabulary"),
            ({"records": [msgspec.Raw(b"\x01")]}, 400, "cannot be read"),
        ]
        for changed, status, words in cases:
            reply = await move(server, stream, seal(server, frames[:5], **changed))
            assert (reply.status, words in reply.json()["error"]["message"]) == (status, True), (changed, reply.body)
            assert reply.json()["error"]["code"] == "handoff_refused"
        assert server.services.client.num_outstanding == 0


async def test_a_response_that_is_no_stream_has_no_frames() -> None:
    stream = make_streams(15, 24)[0]
    stream.body = {**stream.body, "stream": False, "stream_options": None}
    async with member() as server:
        reply = await ask(server, stream, FleetKey(KEY).sign(stream.path), msgspec.json.encode(stream.body))
        assert (reply.status, HEADER.decode() in reply.headers) == (200, False)
        assert reply.json()["choices"]
        refused = await ask(server, stream, FleetKey(KEY).sign(stream.path), b'{"messages": 5}')
        assert (refused.status, HEADER.decode() in refused.headers) == (400, False)
        health = await server.request("GET", "/health")
        assert server.services.fleet is not None
        assert health.headers["x-frame-fleet"] == f"{server.services.fleet.instance} {server.services.fleet.identity} {handoff.VERSION}"
        server.services.draining = True
        health = await server.request("GET", "/health")
        assert (health.status, health.headers["x-frame-state"]) == (503, "draining")


async def test_the_identity_is_of_what_tokens_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving({}) as server:
        resolved = server.services.resolved
        known = identify(resolved)
        assert identify(resolved.model_copy(update={"mem_fraction": 0.1, "max_total_tokens": 64})) == known
        other_server = resolved.user.model_copy(update={"server": resolved.user.server.model_copy(update={"port": 1})})
        assert identify(resolved.model_copy(update={"user": other_server})) == known
        assert identify(resolved.model_copy(update={"dtype": "bfloat16"})) != known
        assert identify(resolved.model_copy(update={"max_context": 77})) != known
        monkeypatch.setattr(continuation, "package_version", lambda: "0.0")
        assert identify(resolved) != known


def test_frames_are_read_however_they_are_cut() -> None:
    data = handoff.frame(START, b"abc") + handoff.frame(EVENTS, b"r", b"body" * 50) + handoff.frame(handoff.END, b"", b"")
    whole = list(FrameReader().feed(data))
    assert whole == [(START, b"abc", b""), (EVENTS, b"r", b"body" * 50), (handoff.END, b"", b"")]
    reader = FrameReader()
    assert [found for at in range(len(data)) for found in reader.feed(data[at : at + 1])] == whole
    for wrong in (b"\x09" + data[1:], b"data: [DONE]\n\n", b"\x01" + b"\xff" * 8):
        with pytest.raises(ValueError, match="unknown kind or size"):
            list(FrameReader().feed(wrong))


def test_signatures_expire_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    key, now = FleetKey(KEY), time.time()
    signature = key.read(key.sign("/generate", "me", b"state", b"body"))
    key.check(signature, "/generate", "me", b"state", b"body")
    monkeypatch.setattr(handoff.time, "time", lambda: now + 200)
    with pytest.raises(handoff.HandoffError, match="expired"):
        key.read(f"1.{signature.nonce}.{signature.expires}.5.{signature.code}".encode())
    later: Signature = key.read(key.sign("/generate", "me", b"state", b"body"))
    key.check(later, "/generate", "me", b"state", b"body")
    assert list(key._nonces) == [later.nonce]


def test_a_short_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAME_FLEET_KEY", "short")
    with pytest.raises(ConfigurationError, match="FRAME_FLEET_KEY has 5 characters"):
        read_fleet_key()
    monkeypatch.delenv("FRAME_FLEET_KEY")
    assert read_fleet_key() is None


async def test_a_server_that_drains_asks_for_moves() -> None:
    stream = make_streams(15, 24)[0]
    async with member() as server:
        assert server.services.fleet is not None
        await server.services.client.send_command("pause")
        task = asyncio.create_task(read_frames(server, stream))
        while not server.services.client.num_outstanding:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        await server.services.fleet.ask_for_moves()  # the stream has not begun, and asks when it does
        await server.services.client.send_command("resume")
        frames = await task
        assert [kind for kind, _, _ in frames[:3]] == [START, handoff.DRAINING, EVENTS]
        assert [kind for kind, _, _ in frames].count(handoff.DRAINING) == 1
    async with member() as server:
        assert server.services.fleet is not None
        task = asyncio.create_task(read_frames(server, stream))
        while not server.services.fleet.recorders and not task.done():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        await server.services.fleet.ask_for_moves()
        assert [kind for kind, _, _ in await task].count(handoff.DRAINING) == 1
        assert not server.services.fleet.recorders


async def test_a_stream_that_the_server_still_runs_is_refused_for_a_moment() -> None:
    """A server that hung comes back with the sequence before it hears that the router has left."""
    stream = make_streams(15, 24)[0]
    stream.body["request_id"] = "mine"
    async with member() as server:
        frames = await read_frames(server, stream)
        await server.services.client.send_command("pause")
        running = asyncio.create_task(read_frames(server, stream))
        while not server.services.client.num_outstanding:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        reply = await move(server, stream, seal(server, frames[:5]))
        assert (reply.status, "mine" in reply.json()["error"]["message"]) == (503, True), reply.body
        await server.services.client.send_command("resume")
        await running
        assert (await move(server, stream, seal(server, frames[:5]))).status == 200
