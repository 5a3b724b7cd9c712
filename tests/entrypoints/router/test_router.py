"""`frame router` in front of replicas that answer real HTTP: hit rate, a replica that dies, hangs
or refuses, and what may be repeated."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from frame.core.errors import ConfigError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.http.protocol.api_route import Access
from frame.entrypoints.http.protocol.bodies import AT_ONCE
from frame.entrypoints.router import proxy
from frame.entrypoints.router.discovery import check_url
from frame.entrypoints.router.exchange import MAX_REFUSAL_LENGTH
from frame.entrypoints.router.replicas import Backends
from frame.entrypoints.router.requests import BROADCAST, MAX_READ_LENGTH, is_pinned, is_repeatable, is_stored, read_prompt
from tests.entrypoints.published import ROUTES
from tests.entrypoints.router.fake_replica import FakeReplica, check_reply, raw_replica, routed


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in contents], **fields}


async def talk(client: httpx.AsyncClient, turns: int, size: int, draw: random.Random) -> None:
    contents: list[str] = []
    for _ in range(turns):
        contents.append("".join(draw.choices("abcdefgh", k=size)))
        response = await client.post("/v1/chat/completions", json=chat(*contents))
        assert response.status_code == 200


@pytest.mark.slow
async def test_turns_of_conversations_hit_the_cache() -> None:
    """Three replicas hit as often as one with all caches; drawn by lot they hit less."""

    async def hit_rate(count: int, by_lot: bool) -> float:
        replicas = [FakeReplica() for _ in range(count)]
        async with routed(*replicas) as (client, backends, _):
            if by_lot:
                lot = random.Random(6)
                backends.choose = lambda _, tried=(), *__: backends.all[lot.randrange(count)]  # type: ignore[method-assign]
            draw = random.Random(5)
            await asyncio.gather(*(talk(client, 6, 700, draw) for _ in range(12)))
        return sum(replica.hits for replica in replicas) / sum(replica.blocks for replica in replicas)
    alone, routed_rate, by_lot = await hit_rate(1, False), await hit_rate(3, False), await hit_rate(3, True)
    assert routed_rate >= 0.95 * alone
    assert by_lot < 0.8 * alone


async def test_a_hot_prefix_is_not_slower_than_by_turns() -> None:
    """One prefix for all requests: every replica gets it, and their loads are even."""
    replicas = [FakeReplica(slowness=0.01), FakeReplica(slowness=0.01)]
    async with routed(*replicas) as (client, _, _):
        hot = "the same beginning " * 200
        await asyncio.gather(*(client.post("/v1/chat/completions", json=chat(hot, str(n))) for n in range(120)))
    shares = sorted(replica.requests for replica in replicas)
    assert shares[1] <= 1.05 * 60 + 4  # the difference of loads that counts as none
    assert min(replica.hits / replica.blocks for replica in replicas) > 0.9


async def test_a_slow_replica_gets_fewer_requests() -> None:
    fast, slow = FakeReplica(slowness=0.002), FakeReplica(slowness=0.5)
    async with routed(slow, fast) as (client, _, _):

        async def one_after_another(worker: int) -> None:
            for number in range(12):
                await client.post("/v1/completions", json={"prompt": f"{worker} {number} " + "x" * 300})

        await asyncio.gather(*(one_after_another(worker) for worker in range(8)))
    assert slow.requests < 0.5 * fast.requests


async def test_a_dead_replica_loses_nothing_that_had_not_begun() -> None:
    """The replica dies under load: requests without a byte of an answer are repeated, a stream that
    has begun ends with an error event that names it."""
    dying, other = FakeReplica(slowness=0.05), FakeReplica(slowness=0.005)
    async with routed(dying, other) as (client, backends, metrics):
        waiting = [asyncio.create_task(client.post("/v1/chat/completions", json=chat(f"{n}"))) for n in range(20)]
        broken = asyncio.create_task(_post_to(backends, client, 0, chat("x", kind="break", stream=True), {"x-request-id": "mine"}))
        replies = await asyncio.gather(*waiting)
        assert [response.status_code for response in replies] == [200] * 20
        text = (await broken).text
        assert text.count('data: {"token"') == 3
        assert "request mine" in text.split("\n\n")[-2]
        assert not backends.all[0].is_healthy
        assert b'frame_router_requests_total{outcome="broken"} 1.0' in metrics.render()
        health = (await client.get("/health")).json()["replicas"]
        assert sorted(health.values()) == ["ok", "unhealthy"]


def test_an_answer_without_events_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with routed(FakeReplica()) as (client, _, metrics):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/generate", json={"text": "x", "kind": "break whole"})
            found = metrics.render()
            assert b'frame_router_requests_total{outcome="broken"} 1.0' in found and b"client_gone" not in found

    asyncio.run(main())  # what the end of the loop logs counts
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [text for text in errors if "completing response" in text]  # the replica, which is cancelled, logs one
    assert sum("breaks off" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("half", [b"", b'data: {"tok'])
async def test_the_error_event_of_a_stream_is_an_event_of_its_own(half: bytes) -> None:
    replica = FakeReplica()
    replica.half_event = half
    async with routed(replica) as (client, _, _):
        events = (await client.post("/generate", json={"text": "x", "kind": "break"})).text.split("\n\n")
        assert events[3:-2] == ([half.decode()] if half else [])
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 502


async def _post_to(backends: Backends, client: httpx.AsyncClient, number: int, body: Any, headers: dict[str, str]) -> httpx.Response:
    """A request that the router sends to the replica `number`."""
    choose = backends.choose

    def pinned(*_: Any) -> Any:
        backends.choose = choose  # type: ignore[method-assign]
        return backends.all[number]

    backends.choose = pinned  # type: ignore[method-assign]
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_what_a_replica_may_have_begun_is_repeated_only_if_it_keeps_nothing() -> None:
    dying, other = FakeReplica(), FakeReplica()
    async with routed(dying, other) as (client, backends, _):
        backends.choose = lambda _, tried=(), *__: next((each for each in backends.all if each.number not in tried), None)  # type: ignore[method-assign]
        response = await client.post("/v1/conversations", json={"kind": "die"}, headers={"x-request-id": "mine"})
        assert response.status_code == 502
        assert "request mine, which is not repeated" in response.json()["error"]["message"]
        assert other.requests == 0
    dying, other = FakeReplica(), FakeReplica()
    async with routed(dying, other) as (client, backends, _):
        await dying.kill()  # it never gets the request
        assert (await client.post("/v1/conversations", json={})).status_code == 200
        assert other.requests == 1


async def test_a_hanging_replica_is_left_by_requests_that_wait() -> None:
    hanging, other = FakeReplica(), FakeReplica()
    async with routed(hanging, other) as (client, backends, _):
        task = asyncio.create_task(_post_to(backends, client, 0, chat("x", kind="hang"), {}))
        await asyncio.sleep(0.1)
        hanging.status = 503
        for _ in range(2):
            await backends.check(backends.all[0])
        await asyncio.sleep(0.1)
        assert other.requests == 1  # repeated there, where it hangs as well
        task.cancel()
        hanging.status = 200
        await backends.check(backends.all[0])
        assert backends.all[0].is_healthy


async def test_a_refusing_replica_is_passed_over_and_the_last_refusal_passed_on() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.status = 429
    async with routed(first, second) as (client, _, _):
        for _ in range(6):
            assert (await client.post("/generate", json={"text": "a"})).status_code == 200
        second.status = 429
        response = await client.post("/generate", json={"text": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        second.status = first.status = 200
        assert (await client.get("/v1/responses/resp_1")).status_code == 404
        assert first.requests + second.requests >= 10  # both were asked for the response


async def test_keys_are_passed_on_and_large_bodies_refused() -> None:
    replica = FakeReplica()
    async with routed(replica) as (client, _, _):
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer secret"})
        assert replica.keys == ["Bearer secret"]
        named = {"authorization": "Bearer other", "connection": "keep-alive, Authorization"}  # of this connection alone
        await client.post("/v1/completions", json={"prompt": "x"}, headers=named)
        assert replica.keys.pop() == ""
        response = await client.request("OPTIONS", "/", extensions={"target": b"*"})
        assert (response.status_code, "begins with /" in response.text) == (400, True)
        requests = replica.requests
        response = await client.post("/v1/completions", content=b"x" * (2 << 20))
        assert response.status_code == 413
        assert replica.requests == requests
    assert f"larger than {1 << 20} bytes" in response.json()["error"]["message"]


async def test_hosts_and_targets_are_passed_on_as_they_came() -> None:
    """By `Host` a replica without a key refuses pages of other names (DNS rebinding)."""
    replica = FakeReplica()
    async with routed(replica) as (client, _, _):
        target = b"/v1/../a%2Fb?c=%41"
        await client.get("/", headers={"host": "evil.example:80"}, extensions={"target": target})
        assert replica.targets == [(b"evil.example:80", target)]


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("response", "status", "expected"),
    [(b"HTTP/1.1 600 X\r\ncontent-length: 0\r\n\r\n", 502, "sent status 600"),
     (b"HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n", 502, "sent status 999"),
     (b"HTTP/1.1 200 OK\r\nx: a\x01b\r\ncontent-length: 0\r\n\r\n", 502, "a header with control characters"),
     (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nHELLO\r\n0\r\n\r\n", 200, "HELLO"),
     (STREAM + b"transfer-encoding: chunked\r\n\r\n2\r\nOK\r\n", 200, "was lost while it answered request mine"),
     (STREAM + b"content-length: 9\r\n\r\nOK", None, ""),
     (b"SECRET of another response\r\n\r\n", 503, "is lost: RemoteProtocolError; try again later")],
)  # fmt: skip
async def test_an_invalid_response_ends_its_request_with_a_sentence(
    response: bytes, status: int | None, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_replica(response, is_closed=True) as url, routed(urls=(url,)) as (client, backends, _):
        await check_reply(client, "/generate", {"text": "x"}, status, expected)
        assert backends.all[0].is_healthy
        assert not [record for record in caplog.records if record.exc_info]  # no traceback of the server


async def test_a_refusal_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "REFUSAL_TIME", 0.1)
    refusal = b"HTTP/1.1 503 X\r\ncontent-length: 9\r\n\r\nO"
    async with raw_replica(refusal) as url, routed(FakeReplica(), urls=(url,)) as (client, backends, _):
        backends.choose = lambda _, tried=(), *__: next((each for each in backends.all if each.number not in tried), None)  # type: ignore[method-assign]
        assert (await client.post("/generate", json={"text": "x"}, timeout=5)).status_code == 200


def test_every_route_has_a_class() -> None:
    """A route that keeps nothing may be repeated; what changes a server goes to all of them."""
    for each in ROUTES:
        path = each.path.replace("{name}", "x")
        if "POST" in each.methods and each.access is Access.USER:
            assert is_repeatable("POST", path) or is_stored(path) or is_pinned(path), path
        if "POST" in each.methods and each.access is Access.ADMIN:
            assert path in BROADCAST


async def test_a_slash_at_the_end_makes_no_difference() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    async with routed(*replicas) as (client, _, _):
        await client.post("/flush_cache/", json={})
        assert [replica.requests for replica in replicas] == [1, 1]


async def test_an_invalid_answer_keeps_no_replica_from_a_request_for_all() -> None:
    replica = FakeReplica()
    async with raw_replica(b"HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n") as url, routed(replica, urls=(url,)) as (client, _, _):
        response = await client.post("/flush_cache")
        assert (response.status_code, "sent status 999" in response.text, replica.requests) == (502, True, 1)


async def test_the_client_s_address_is_passed_on() -> None:
    replica = FakeReplica()
    async with routed(replica) as (client, _, _):
        await client.post("/generate", json={"text": "x"}, headers={"x-forwarded-for": "192.0.2.1"})
        assert replica.addresses == [["192.0.2.1", "192.0.2.1"]]  # of a proxy on this machine; then what the router saw


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with routed(FakeReplica(), pause=0.05) as (client, _, _):

        async def body() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(0.3)

        response = await client.post("/generate", content=body())
        assert (response.status_code, "did not come within" in response.text) == (408, True)


async def test_answers_without_an_end_are_cut() -> None:
    """A replica's health check and refusal that never end."""
    replica = FakeReplica()
    async with routed(replica) as (client, backends, _):
        replica.is_endless = True
        await asyncio.wait_for(backends.check(backends.all[0]), 5)
        assert backends.all[0].is_healthy
        replica.status = 503
        for path, status in (("/generate", 503), ("/flush_cache", 200)):
            replica.status = status
            async with client.stream("POST", path, json={}) as response:
                raw = b"".join([part async for part in response.aiter_raw()])  # the router does not unpack it
            assert (response.status_code, len(raw) < 2 * MAX_REFUSAL_LENGTH) == (status, True)


async def test_a_request_that_ends_replicas_is_repeated_once() -> None:
    replicas = [FakeReplica() for _ in range(3)]
    async with routed(*replicas) as (client, _, _):
        response = await client.post("/generate", json={"text": "x", "kind": "die"}, headers={"x-request-id": "mine"})
        assert (response.status_code, "request mine, which is not repeated" in response.text) == (502, True)
        assert sum(replica.requests for replica in replicas) == 2


async def test_the_bodies_of_all_requests_are_bounded() -> None:
    replica = FakeReplica()
    async with routed(replica) as (client, _, _):
        body = json.dumps({"kind": "hang", "prompt": "x" * 1_000_000})
        waiting = [asyncio.create_task(client.post("/generate", content=body)) for _ in range(AT_ONCE // 2)]
        while replica.running < AT_ONCE // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        response = await client.post("/generate", content=body)  # the share of one address
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert "leave free of" in response.text
        for task in waiting:
            task.cancel()
        for _ in waiting:  # the first ones may come before the others have left
            response = await client.post("/generate", content=body.replace("hang", "none"))
            await asyncio.sleep(0.01)
        assert response.status_code == 200


@pytest.mark.parametrize(("path", "status"), [("/flush_cache", 502), ("/abort_request", 200)])
async def test_a_lost_replica_does_not_keep_a_request_for_all_from_the_others(path: str, status: int) -> None:
    first, second = FakeReplica(), FakeReplica()
    async with routed(first, second) as (client, _, _):
        await first.kill()
        response = await client.post(path, json={"rid": "x"})
        assert (response.status_code, second.requests) == (status, 1)


@pytest.mark.parametrize(("path", "status"), [("/flush_cache", 504), ("/abort_request", 200)])
async def test_a_replica_that_hangs_is_named_in_a_request_for_all(path: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "BROADCAST_TIME", 0.3)
    hanging, other = FakeReplica(), FakeReplica()
    hanging.slowness = 60.0
    async with routed(hanging, other) as (client, backends, _):
        response = await client.post(path, json={"rid": "x"})
        assert (response.status_code, other.requests) == (status, 1)
        if status == 504:
            sentence = f"replica {hanging.url} did not answer within 0.3 s; 1 of 2 replicas have done it"
            assert response.json()["error"]["message"] == sentence
        assert [backend.outstanding for backend in backends.all] == [0, 0]


@pytest.mark.parametrize("size", [1, 300_000])  # what one read takes, and more
@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_bytes_after_an_answer_are_no_answer_to_the_next_request(size: int, pause: float) -> None:
    later = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (size, b"x" * size)
    response = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"
    async with raw_replica(response, further=later, pause=pause) as url, routed(urls=(url,)) as (client, _, _):
        for _ in range(4):
            assert (await client.post("/generate", json={"text": "x"})).content == b"OK"
            await asyncio.sleep(3 * pause)


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_may_have_a_length(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with raw_replica(b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\n" % status) as url, routed(urls=(url,)) as (client, _, _):
        for _ in range(2):
            response = await client.get("/v1/models")
            assert (response.status_code, response.content) == (status, b"")
    assert not [record for record in caplog.records if record.exc_info]


async def test_connections_to_replicas_are_kept() -> None:
    replica = FakeReplica()
    async with routed(replica) as (client, _, _):
        for _ in range(5):
            await client.post("/generate", json={"text": "x"})
        assert len(replica.ports) == 1


async def test_a_client_that_leaves_ends_its_request() -> None:
    replica = FakeReplica()
    async with routed(replica) as (client, backends, _):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json={"text": "x", "kind": "hang"}, timeout=0.2)
        await asyncio.sleep(0.1)
        assert backends.all[0].outstanding == 0


def test_prompts_are_compared_from_their_beginning() -> None:
    first, second = (read_prompt(json.dumps(chat("a" * 600, extra)).encode()).blocks for extra in ("b" * 600, "c" * 600))
    assert first[:2] == second[:2]
    assert first[-1] != second[-1]
    assert read_prompt(json.dumps(chat("a" * 600, model="other")).encode()).blocks[0] != first[0]
    assert read_prompt(json.dumps(chat("a" * MAX_READ_LENGTH)).encode()).blocks == []  # it would hold the event loop
    for body in (b"no JSON", b"[]", b"{}", b"[" * 200_000, b'"\xff"'):
        assert read_prompt(body).blocks == []
    ids = b"1," * 600 + b"1]"
    several, one = (read_prompt(b'{"prompt":' + each + b"}").blocks for each in (b"[[" + ids + b",[2]]", b"[" + ids))
    assert several[:4] == one[:4] != []
    texts = [json.dumps({**nulls, "text": "a" * 600}).encode() for nulls in ({}, {"input_ids": None, "prompt": None})]
    assert read_prompt(texts[0]).blocks == read_prompt(texts[1]).blocks != []
    named = (b'{"model":"sql","prompt":"a"}', b'{"model":"base","lora_path":"/sql","text":"a"}', b'{"model":"base","prompt":"a"}')
    assert [len(read_prompt(body, {b'"sql"'}).blocks) for body in named] == [1, 1, 0]
    assert [read_prompt(body).model for body in (*named, b"no JSON")] == [b'"sql"', b'"/sql"', b'"base"', b""]
    objects = b'{"prompt":[' + b'{"a":1},' * 50_000 + b"1]}"
    tracemalloc.start()
    assert len(read_prompt(objects).blocks) == 64 * 1024 // 256
    assert tracemalloc.get_traced_memory()[1] < len(objects)  # no object is built
    tracemalloc.stop()
    assert is_repeatable("POST", "/v1/chat/completions")
    assert not is_repeatable("POST", "/v1/responses")


def test_wrong_addresses_are_refused() -> None:
    assert check_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000"
    named = ("http://host/v1", "http://user:secret@host", "http://host:99999", "http://a b:1")
    for wrong in ("127.0.0.1:8000", "ftp://host", "http://", *named):
        with pytest.raises(ConfigError, match="write http://HOST:PORT") as refusal:
            check_url(wrong)
        assert "secret" not in str(refusal.value)
    twice = CliRunner().invoke(cli, ["router", "--replica", "http://a:1", "--replica", "http://a:1/"])
    assert (twice.exit_code, "twice" in twice.output) == (78, True)
