"""The router with replicas that send frames and die: what it sends to whom, what the client sees,
and which streams end."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from frame.entrypoints import handoff
from frame.entrypoints.handoff import DRAINING, END, EVENTS, HEADER, PIECE, START, FleetKey, Handoff, StreamStart, Write, decode_handoff
from frame.entrypoints.router import moving
from frame.entrypoints.router.exchange import MAX_LOST_IN_ALL, Losses
from frame.interfaces.routing import RoutingContext
from frame.plugins.routing_policies.least_load import LeastLoad
from tests.entrypoints.router.fake_replica import FakeReplica, raw_replica, routed

KEY = FleetKey("the key of these replicas")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


class FramedReplica(FakeReplica):
    """A replica that answers with frames of one token each: 0, 1, 2 … `total` - 1. `script` may end
    the server, or the answer, at a token. `refusal`: (status, sentence) for handoffs."""

    def __init__(self, total: int = 8) -> None:
        super().__init__()
        self.total, self.script, self.refusal = total, dict[int, str](), (0, "")
        self.handoffs: list[Handoff] = []
        self.bodies: list[bytes] = []
        self.is_draining = False
        self.padding, self.version, self.delay = 0, handoff.VERSION, 0.0  # seconds before it continues a stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            headers = [(b"content-length", b"2"), (handoff.FLEET, f"{self.url} same {self.version}".encode())]
            headers += [(b"x-frame-state", b"draining")] if self.is_draining else []
            await send({"type": "http.response.start", "status": 503 if self.is_draining else 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        await super().__call__(scope, receive, send)

    async def _reply(self, scope: Any, body: bytes, send: Any) -> None:
        value = dict(scope["headers"])[HEADER]
        signature, first = KEY.read(value), 0
        state, rest = body[: signature.length], body[signature.length :]
        KEY.check(signature, scope["path"], self.url if state else "", state, rest if state else b"")
        self.bodies.append(rest)
        if state:
            self.handoffs.append(decode_handoff(state))
            await asyncio.sleep(self.delay)
            first = sum(len(write.token_ids) for record in self.handoffs[-1].records for write in record)
            if self.refusal[0]:
                body = self.refusal[1].encode("latin-1") if self.refusal[1].startswith('"') else b""
                await self._send(send, self.refusal[0], body or json.dumps({"error": {"message": self.refusal[1]}}).encode())
                return
        head = [(b"content-type", b"text/event-stream"), (HEADER, b"1"), (b"x-from", self.url.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if self.script.get(-1) == "early":
            await self._write(send, handoff.frame(EVENTS, b"x", b"data: early\n\n"))
        start = msgspec.msgpack.encode(StreamStart(self.url, 1.0, [7], b"", "default"))
        await self._write(send, handoff.frame(START, start))
        for token in range(first, self.total):
            act = self.script.get(token, "")
            if act == "die":
                await asyncio.sleep(0.02)
                self._dying = asyncio.create_task(self.kill())
                await asyncio.sleep(60)
            if act == "cut":
                await self._write(send, handoff.frame(EVENTS, b"xxxx", b"lost")[:9])
                raise RuntimeError("the answer breaks off")
            if act == "nonsense":
                await self._write(send, b"data: nonsense\n\n" * 9)
            if act == "part":
                await self._write(send, handoff.frame(PIECE, b"", b"data: half"))
                raise RuntimeError("the answer breaks off")
            if act == "drain":
                await self._write(send, handoff.frame(DRAINING))
            if act == "wait":
                await asyncio.sleep(1.5)
            record = msgspec.msgpack.encode([Write(0, [token], 0)]) + b""
            await self._write(send, handoff.frame(EVENTS, record, b'data: {"token": %d}\n\n' % token + b":" * self.padding))
            await asyncio.sleep(0.002)
        await send({"type": "http.response.body", "body": handoff.frame(END, b"", b"data: [DONE]\n\n"), "more_body": False})

    async def _write(self, send: Any, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def tokens(text: str) -> list[Any]:
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(event) if event != "[DONE]" else event for event in events]


def whole(count: int = 8) -> list[Any]:
    return [*({"token": number} for number in range(count)), "[DONE]"]


async def test_a_stream_moves_and_the_client_sees_one() -> None:
    """Whatever ends the first replica's answer, the second one continues it; headers are the first
    one's, without those of the fleet, and the body and its age go on."""

    async def main(act: str) -> None:
        first, second = FramedReplica(), FramedReplica()
        first.script[3] = act
        async with routed(first, second, key=KEY) as (client, backends, metrics):
            backends.choose = lambda _, tried=(), *__: next((b for b in backends.healthy if b.number not in tried), None)  # type: ignore[method-assign]
            await asyncio.gather(*(backends.check(backend) for backend in backends.all))
            reply = await client.post("/v1/chat/completions", json=CHAT)
            assert tokens(reply.text) == whole(), act
            assert (reply.headers["x-from"], HEADER.decode() in reply.headers) == (first.url, False)
            found = second.handoffs + first.handoffs[:1]
            continued = [write.token_ids for record in found[0].records for write in record]
            assert continued == [[number] for number in range(len(continued))]
            assert len(continued) >= 3 if act == "drain" else len(continued) == 3  # tokens that come with the frame DRAINING
            assert (found[0].start.rid, found[0].start.seeds, found[0].identity) == (first.url, [7], "same")
            assert 0 < found[0].age < 5
            assert json.loads([*second.bodies, *first.bodies[1:]][0]) == CHAT
            rendered = metrics.render().decode()
            assert f'frame_router_moved_streams_total{{cause="{"drained" if act == "drain" else "lost"}"}} 1.0' in rendered
            assert [backend.outstanding for backend in backends.all] == [0, 0]

    for act in ("die", "cut", "nonsense", "drain"):
        await main(act)


async def test_streams_that_move_at_once_spread_over_the_others() -> None:
    """Each counts where it is about to go. One whose client leaves meanwhile is left alone."""
    replicas = [FramedReplica(30) for _ in range(3)]
    replicas[0].script[20] = "die"
    for replica in replicas[1:]:
        replica.delay = 0.5
    async with routed(*replicas, key=KEY, policy=LeastLoad(RoutingContext())) as (client, backends, _):
        first, *others = backends.all
        await backends.check(first)
        for other in others:
            other.state = "joining"
        tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(12)]
        while replicas[0].running < 12:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)
        await asyncio.gather(*(backends.check(other) for other in others))
        while sum(len(replica.handoffs) for replica in replicas[1:]) < 12:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        assert sorted(len(replica.handoffs) for replica in replicas) == [0, 6, 6]
        assert [backend.outstanding for backend in others] == [6, 6]
        tasks[0].cancel()
        assert [tokens((await task).text) for task in tasks[1:]] == [whole(30)] * 11
        async with asyncio.timeout(10):
            while any(backend.outstanding for backend in backends.all) or any(replica.running for replica in replicas[1:]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_replica_that_is_removed_passes_on_what_moves_to_it() -> None:
    """It does not leave before, so that it is checked while it has the stream."""
    replicas = [FramedReplica(60) for _ in range(3)]
    replicas[0].script[5], replicas[1].delay = "die", 0.5
    async with routed(*replicas, key=KEY) as (client, backends, _):
        backends.choose = lambda _, tried=(), *__: next((b for b in backends.healthy if b.number not in tried), None)  # type: ignore[method-assign]
        await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        second = backends.all[1]
        task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        while not replicas[1].handoffs:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)
        backends.remove(second)
        backends._drop_left()
        assert second in backends.all
        assert tokens((await task).text) == whole(60)
        assert len(replicas[2].handoffs) == 1
        backends._drop_left()
        assert second not in backends.all


async def test_the_state_of_a_long_response_fits() -> None:
    """100,000 tokens, each in an event of its own."""
    mover = moving.StreamMover(KEY, SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    sent = list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message["body"])

    async def open_stream(*arguments: Any) -> Any:
        sent[:] = arguments[3:]
        return httpx.Response(200, headers={HEADER.decode(): "1"})

    request: Any = SimpleNamespace(send=send, path="/generate", body=b"")
    stream = moving._Stream(request, "same", Losses())
    stream.start = msgspec.msgpack.encode(StreamStart("rid", 1.0, [7], b"", "default"))
    head = httpx.Response(200)
    for token in range(100_000):
        await mover._take(stream, EVENTS, msgspec.msgpack.encode([Write(0, [100_000 + token], 20)]), b"x", head)
    assert not stream.problem
    mover._exchange = SimpleNamespace(open=open_stream)  # type: ignore[assignment]
    await mover._continue(stream, SimpleNamespace(instance="it"))  # type: ignore[arg-type]
    *turns, found = handoff.decode_in_turns(sent[0])
    assert len(turns) == 50 and found is not None  # between which the event loop serves others
    assert [write.token_ids for record in found.records for write in record] == [[100_000 + token] for token in range(100_000)]


async def test_frames_before_the_start_are_none() -> None:
    """Nothing was sent to the client, so another replica gets the request."""
    first, second = FramedReplica(), FramedReplica()
    first.script[-1] = "early"
    async with routed(first, second, key=KEY) as (client, backends, _):
        backends.choose = lambda _, tried=(), *__: next((b for b in backends.healthy if b.number not in tried), None)  # type: ignore[method-assign]
        await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        reply = await client.post("/v1/chat/completions", json=CHAT)
        assert (tokens(reply.text), reply.headers["x-from"]) == (whole(), second.url)


async def test_a_loss_is_said_once_and_without_bytes_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first event of a stream, and after it."""
    monkeypatch.setattr(moving, "MOVE_TIME", 0.2)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n" + HEADER + b": 1\r\n\r\n"
    start = handoff.frame(START, msgspec.msgpack.encode(StreamStart("rid", 1.0, [7], b"", "default")))

    async def main(data: bytes) -> None:
        async with raw_replica(head + data + b"SECRET\r\n") as url, routed(urls=(url,), key=KEY) as (client, backends, _):
            backends.all[0].instance = url
            reply = await client.post("/v1/chat/completions", json=CHAT)
            assert (reply.text.count(f"replica {url} is lost: RemoteProtocolError"), reply.text.count("is lost")) == (1, 1), reply.text
            assert "SECRET" not in reply.text

    for data in (b"", b"%x\r\n%s\r\n" % (len(start), start)):
        await main(data)


async def test_what_two_replicas_died_of_is_not_sent_to_a_third() -> None:
    replicas = [FramedReplica() for _ in range(3)]
    for replica in replicas:
        replica.script[3] = "die"
    async with routed(*replicas, key=KEY) as (client, backends, metrics):
        await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        reply = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "poison"})
        *begun, last = tokens(reply.text)
        assert begun == whole()[:3]
        assert "which may be the cause" in last["error"]["message"]
        assert "poison" in last["error"]["message"]
        assert sorted(replica.requests for replica in replicas) == [0, 1, 1]
        assert 'cause="failed"} 1.0' in metrics.render().decode()
        assert len(backends.healthy) == 1


async def test_progress_clears_a_stream_but_not_for_ever() -> None:
    """Replicas that die at different tokens are not the request's fault, until there are four."""

    async def main(count: int) -> None:
        replicas = [FramedReplica(60) for _ in range(count + 1)]
        for number, replica in enumerate(replicas[:count]):
            replica.script[10 * number + 9] = "die"
        async with routed(*replicas, key=KEY) as (client, backends, _):
            backends.choose = lambda _, tried=(), *__: next((b for b in backends.healthy if b.number not in tried), None)  # type: ignore[method-assign]
            await asyncio.gather(*(backends.check(backend) for backend in backends.all))
            found = tokens((await client.post("/v1/chat/completions", json=CHAT)).text)
            if count < MAX_LOST_IN_ALL:
                assert found == whole(60)
            else:
                assert "4. one with this request" in found[-1]["error"]["message"]
            assert replicas[-1].requests == (count < MAX_LOST_IN_ALL)

    for count in (3, 4):
        await main(count)


async def test_a_stream_that_cannot_move_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model, a part of an event, or too much state: the client gets the reason. Without
    another replica it waits for one."""
    monkeypatch.setattr(moving, "MAX_KEPT", 300)

    async def main(case: str, words: str) -> None:
        monkeypatch.setattr(moving, "MOVE_TIME", 0.5 if case in ("full", "alone") else 40.0)
        first, second = FramedReplica(60), FramedReplica(60)
        first.script[50 if case == "large" else 3] = "part" if case == "part" else "die"
        second.refusal = (409, "another checkpoint") if case == "model" else (503, "full") if case == "full" else (0, "")
        second.refusal = (400, '"\xff\xfe"') if case == "nonsense" else second.refusal
        async with routed(*((first,) if case == "alone" else (first, second)), key=KEY) as (client, backends, _):
            backends.choose = lambda _, tried=(), *__: next((b for b in backends.healthy if b.number not in tried), None)  # type: ignore[method-assign]
            await asyncio.gather(*(backends.check(backend) for backend in backends.all))
            text = (await client.post("/v1/chat/completions", json=CHAT)).text
            found = text if case == "part" else tokens(text)[-1]["error"]["message"]
            assert words in found, found

    cases = {"model": "another checkpoint", "part": "a part of an event", "large": "bytes of state", "full": "full", "alone": "no other",
             "nonsense": "it sent no reason"}  # fmt: skip
    for case, words in cases.items():
        await asyncio.wait_for(main(case, words), 20)


async def test_state_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a stream that has ended, or whose client has left, is dropped; what all streams
    keep is bounded, and those beyond it go on."""
    replica = FramedReplica(40)
    replica.script[20] = "wait"
    async with routed(replica, key=KEY) as (client, backends, _):
        await backends.check(backends.all[0])
        movers: list[moving.StreamMover] = []
        keep = moving.StreamMover._keep

        def watched(self: moving.StreamMover, stream: Any, size: int) -> None:
            movers.append(self)
            keep(self, stream, size)

        monkeypatch.setattr(moving.StreamMover, "_keep", watched)
        monkeypatch.setattr(moving, "MAX_KEPT_IN_ALL", 3000)
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(8)))
        assert all(tokens(reply.text) == whole(40) for reply in replies)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=CHAT, timeout=0.3)
        async with asyncio.timeout(5):
            while movers[0]._num_kept or backends.all[0].outstanding:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_draining_replica_keeps_what_no_other_takes() -> None:
    """It goes on with its streams until another replica can continue them, and gets no new ones."""

    async def main(has_other: bool) -> None:
        first, second = FramedReplica(1200 if has_other else 60), FramedReplica(1200)
        async with routed(first, second, key=KEY) as (client, backends, metrics):
            await asyncio.gather(*(backends.check(backend) for backend in backends.all))
            await second.kill()
            await backends.check(backends.all[1], is_suspect=True)
            task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            while not first.running:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.001)
            first.is_draining = True
            await backends.check(backends.all[0])
            assert backends.all[0].state == "draining"
            assert not backends.all[0].lost.is_set()
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
            if has_other:
                await second.start()
                backends.all[1].url = second.url
                await backends.check(backends.all[1])
            assert tokens((await task).text) == whole(first.total)
            assert f'cause="drained"}} {1.0 if has_other else 0.0}' in metrics.render().decode() or not has_other
            assert len(second.handoffs) == has_other

    for has_other in (False, True):
        await main(has_other)


def test_the_header_is_the_routers_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A client's header is refused, and a replica without a key does not get it."""

    async def main() -> None:
        replica, plain = FramedReplica(), FakeReplica()
        async with routed(replica, key=KEY) as (client, backends, _):
            await backends.check(backends.all[0])
            for value in ("1", KEY.sign("/v1/chat/completions").decode()):
                reply = await client.post("/v1/chat/completions", json=CHAT, headers={HEADER.decode(): value})
                assert (reply.status_code, "leave it out" in reply.text, replica.requests) == (400, True, 0)
        async with routed(plain, key=KEY) as (client, backends, _):
            await backends.check(backends.all[0])
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        newer = FramedReplica()
        newer.version += 1  # it would refuse the header's version
        async with routed(newer, key=KEY) as (client, backends, _):
            await backends.check(backends.all[0])
            assert (backends.all[0].instance, backends.all[0].identity) == ("", "same")

    caplog.set_level(logging.ERROR)
    asyncio.run(main())
    assert not caplog.records
