"""A router that knows from KV events which prefixes replicas have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import httpx
import pytest

from frame.entrypoints.handoff import VERSION, FleetKey
from frame.entrypoints.http.protocol.continuation import FIRST_WEIGHTS, Fleet, digest_prompts
from frame.entrypoints.router.cached_prefixes import LINGER, TIER_WEIGHT, CachedPrefixes, PromptPrefixes
from frame.entrypoints.router.replicas import Backends
from frame.entrypoints.router.requests import BLOCK, read_prompt
from frame.interfaces.routing import RoutingContext, RoutingRequest
from frame.kv_events.prompt_blocks import MAX_HASHED, MAX_TOLD, UNKNOWN, read_blocks, tell_blocks
from frame.kv_events.subscriber import GPU, OTHER, EventReader
from frame.plugins.routing_policies.prefix_load import PrefixLoad
from tests.entrypoints.router.fake_replica import FakeReplica, routed
from tests.entrypoints.router.fleet import KEY
from tests.entrypoints.serving import RunningServer, free_port
from tests.kv_events.test_subscriber import Raw, name_batch, wait

PAGE = 16
SECRET = KEY["FRAME_FLEET_KEY"]


class Rig:
    """`CachedPrefixes` beside replicas whose caches are given."""

    def __init__(self, **caches: dict[int, int] | None) -> None:
        self.now = 100.0
        self.known = CachedPrefixes(EventReader(), lambda: self.now)
        self.replicas = {
            number: (name, None if cache is None else SimpleNamespace(is_live=True, indexes=[cache]))
            for number, (name, cache) in enumerate(caches.items())
        }

    def read(self, text: str, **headers: str) -> PromptPrefixes:
        body = json.dumps({"prompt": text}).encode()
        prefixes = self.known.read(read_prompt(body), [(name.encode(), value.encode()) for name, value in headers.items()])
        assert prefixes is not None
        return prefixes

    def shares(self, prefixes: PromptPrefixes) -> dict[int, float]:
        return self.known.find_shares(prefixes, self.replicas)  # type: ignore[arg-type]


def tokens(text: str) -> list[int]:
    """A tokenizer: a token for a word, however long."""
    return [crc32(word.encode()) % 50_000 for word in text.split()]


def hashes(text: str) -> list[int]:
    told = read_blocks(tell_blocks(tokens(text), "", PAGE))
    assert told is not None
    return told.hashes


def make_text(name: str, words: int, letters: int) -> str:
    return " ".join(f"{name}{number}".ljust(letters, "x") for number in range(words))


SHARED = make_text("s", 400, 7)  # 25 blocks of tokens, 3,200 bytes


def test_shares_follow_the_caches() -> None:
    text = make_text("a", 800, 7)
    blocks = hashes(text)
    rig = Rig(all=dict.fromkeys(blocks, GPU), half=dict.fromkeys(blocks[:25], GPU), none={}, tier=dict.fromkeys(blocks, OTHER), silent=None)
    prefixes = rig.read(text)
    assert rig.shares(prefixes) == {}  # nothing is known yet: the policy estimates
    rig.known.learn(prefixes, tell_blocks(tokens(text), "", PAGE))
    shares = rig.shares(rig.read(text))
    assert shares.keys() == {0, 1, 2, 3} and shares[0] == 1.0 and shares[1] == pytest.approx(0.5, abs=0.05)
    assert shares[2] < 0.01 and shares[3] == pytest.approx(TIER_WEIGHT, abs=0.05)
    assert rig.shares(rig.read(text, authorization="Bearer other")) == {}  # another tenant has other blocks
    rig.known.learn(rig.read(text), UNKNOWN)
    assert rig.shares(rig.read(text)) == {}


@pytest.mark.parametrize(("first", "second"), [(3, 30), (30, 3)])
def test_prompts_of_other_densities_agree_on_what_they_share(first: int, second: int) -> None:
    """The place of a block in the text is an estimate, which is far off for one of them."""
    one, other = SHARED + " " + make_text("a", 400, first), SHARED + " " + make_text("b", 400, second)
    rig = Rig(one=dict.fromkeys(hashes(one), GPU), shared=dict.fromkeys(hashes(SHARED)[:24], GPU))
    for text in (one, other, one, other):
        rig.known.learn(rig.read(text), tell_blocks(tokens(text), "", PAGE))
    third = SHARED + " " + make_text("c", 400, 15)
    prefixes = rig.read(third)
    whole = len(SHARED) // BLOCK / len(prefixes.keys)
    shares = rig.shares(prefixes)
    assert shares[1] == pytest.approx(whole, rel=0.25) and shares[0] == pytest.approx(whole, rel=0.25)
    assert rig.shares(rig.read(one))[0] >= 0.95


def test_requests_that_run_count_as_cached() -> None:
    text = make_text("a", 400, 7)
    rig = Rig(first={}, second={})
    prefixes = rig.read(text)
    rig.known.learn(prefixes, tell_blocks(tokens(text), "", PAGE))
    rig.known.enter(prefixes, "second")
    longer = rig.read(text + " more words" * 100)
    assert rig.shares(prefixes)[1] == 1.0 and 0.5 < rig.shares(longer)[1] < 1.0 and rig.shares(longer)[0] == 0.0
    rig.known.leave(prefixes, "second")
    assert rig.shares(prefixes)[1] == 1.0  # its events are on their way
    rig.now += LINGER + 0.1
    assert rig.shares(prefixes)[1] == 0.0 and not rig.known._running and not rig.known._ended


def test_refused_requests_do_not_count_as_cached() -> None:
    rig = Rig(first={})
    prefixes = rig.read(make_text("a", 400, 7))
    rig.known.learn(prefixes, tell_blocks(tokens(make_text("a", 400, 7)), "", PAGE))
    for _ in range(2):
        rig.known.enter(prefixes, "first")
    rig.known.leave(prefixes, "first", is_refused=True)
    assert rig.shares(prefixes)[0] == 1.0  # the other one runs
    rig.known.leave(prefixes, "first", is_refused=True)
    assert rig.shares(prefixes)[0] == 0.0 and not rig.known._running


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.entrypoints.router.cached_prefixes.MAX_PREFIXES", 50)
    rig = Rig(one={})
    for number in range(30):
        text = make_text(f"a{number}-", 300, 9)
        rig.known.learn(rig.read(text), tell_blocks(tokens(text), "", PAGE))
    assert len(rig.known._blocks) == 50 and rig.shares(rig.read(text))


@pytest.mark.parametrize("length", [0, 15, 16, 4096, 4097, 4112, 70_000])
def test_the_header(length: int) -> None:
    value = tell_blocks(list(range(length)), "owner:salt", PAGE)
    assert len(value) < 3000
    if not length:
        return
    told = read_blocks(value)
    assert told is not None and told.num_tokens == length and len(told.hashes) <= MAX_TOLD
    assert len(told.hashes) == min(length // PAGE, MAX_HASHED) // (told.stride // PAGE)
    longer = read_blocks(tell_blocks([*range(length), *range(9)], "owner:salt", PAGE))
    assert longer is not None and (longer.stride != told.stride or longer.hashes[: len(told.hashes)] == told.hashes)


async def test_long_prompts_are_told_in_turns() -> None:
    """The event loop serves others meanwhile."""
    first = SimpleNamespace(prompt=list(range(131_072)), recovery=SimpleNamespace(media=None, adapter=None), weight_version=FIRST_WEIGHTS)
    state: Any = SimpleNamespace(sequences=[first], first_sequences=[first], namespace="")
    fleet: Any = SimpleNamespace(_page_size=PAGE)
    for work, num_turns in ((Fleet.tell_blocks(fleet, state), 10), (digest_prompts(state), 5)):
        task, turns = asyncio.create_task(work), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > num_turns
    assert await Fleet.tell_blocks(fleet, state) == tell_blocks(first.prompt, "", PAGE)


@pytest.mark.parametrize(
    "value", [b"", b"x", b"1.2", b"1.2.3.4", b"-1.16.", b"1.0.", b"9.16.AAAA", b"9" * 5000 + b".1.", b"9.1." + b"A" * 9000]
)
def test_a_broken_header_is_as_none(value: bytes) -> None:
    with pytest.raises(ValueError):
        read_blocks(value)
    rig = Rig(one={})
    text = make_text("a", 300, 7)
    rig.known.learn(rig.read(text), value)
    assert not rig.known._blocks


def test_the_policy_prefers_what_caches_tell() -> None:
    policy, loads = PrefixLoad(RoutingContext()), {0: 0, 1: 0, 2: 0}
    assert policy.choose_replica(RoutingRequest([1, 2, 3]), loads) == 0
    assert policy.choose_replica(RoutingRequest([1, 2, 3]), loads) == 0  # the estimate
    assert policy.choose_replica(RoutingRequest([1, 2, 3], cached={0: 0.0, 1: 0.2, 2: 0.7}), loads) == 2
    assert policy.choose_replica(RoutingRequest([1, 2, 3, 4], cached={1: 0.2, 2: 0.7}), loads) == 0  # of 0, the estimate is left


class TellingReplica(FakeReplica):
    """Publishes events, and tells the blocks of prompts where it is asked."""

    def __init__(self, raw: Raw | None, told: str = "") -> None:
        super().__init__()
        self.raw, self.told, self.instance, self.asked = raw, told, "instance", list[bytes]()
        self.value = tell_blocks(list(range(640)), "", PAGE)

    async def _send(self, send: Any, status: int, body: bytes) -> None:
        async def add(message: Any) -> None:
            if message["type"] == "http.response.start":
                fleet = f"{self.instance} identity {VERSION}".encode()
                message = {**message, "headers": [*message["headers"], (b"x-frame-fleet", fleet), (b"x-frame-events", self.told.encode())]}
            await send(message)

        await super()._send(add, status, body)

    async def _reply(self, scope: Any, body: bytes, send: Any) -> None:
        asked = [value for name, value in scope["headers"] if name == b"x-frame-blocks"]
        self.asked += asked

        async def add(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-frame-blocks", self.value)]}
            await send(message)

        await super()._reply(scope, body, add)


async def until(is_true: Any) -> None:
    for _ in range(400):
        if is_true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


async def test_the_router_reads_events_and_keeps_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, port, replay_port = Raw(tmp_path), free_port(), free_port()
    raw.socket.bind(f"tcp://127.0.0.1:{port}")
    raw.replays.bind(f"tcp://127.0.0.1:{replay_port}")
    first, second = TellingReplica(None), TellingReplica(raw, f"{port} {replay_port} 1")
    reader = EventReader()
    key = FleetKey(SECRET)
    make = Backends.__init__
    monkeypatch.setattr(Backends, "__init__", lambda *args, **named: make(*args, **named, prefixes=CachedPrefixes(reader)))
    told = read_blocks(first.value)
    assert told is not None
    body = {"prompt": "a prompt of many words " * 60, "kind": "whole"}
    async with routed(second, first, key=key) as (client, backends, metrics):
        for backend in backends.all:
            await backends.check(backend)
        two, one = backends.all
        assert one.events is None and two.events is not None and not two.events.is_live
        await asyncio.to_thread(raw.reply, (name_batch(0), b"\x92\x00\x90"))
        await until(lambda: two.events.is_live)
        raw.socket.send_multipart((b"", name_batch(1), stored_batch(told.hashes)))
        await until(lambda: two.events.indexes[0])
        assert f'frame_router_replica_cached_blocks{{replica="{two.url}"}} 40.0' in metrics.render().decode()
        reply = await client.post("/v1/completions", json=body, headers={"x-frame-blocks": "a client's"})
        assert reply.status_code == 200 and "x-frame-blocks" not in reply.headers
        (asked,) = second.asked
        key.check(key.read(asked), "/v1/completions", "x-frame-blocks")
        for _ in range(3):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (first.requests, second.requests, len(second.asked), first.asked) == (0, 4, 1, [])  # it is known to have all
        events, second.instance = two.events, "another"
        await backends.check(two)
        assert two.events is not events and events.is_closed  # the process is another one
        backends.mark_lost(two, "test")
        assert two.events is None
        second.told, chooser = f"{port} {replay_port} 1", backends._chooser
        await backends.check(two)
        assert two.events is not None
        chooser._policy, policy = None, chooser._policy  # it has failed, and no other looks at what is cached
        await backends.check(two)
        assert two.events is None
        chooser._policy = policy
        for value in ("1", "0 0 1", "99999 0 1", "5557 -1 1", "5557 0 1000000", "x y z", "5557 5558 1 1"):
            second.told = value
            await backends.check(two)
            assert two.state == "serving" and two.events is None
        second.told = f"{port} {replay_port} 1"
        backends.remove(two)
        backends._drop_left()
        await backends.check(two)  # a check that began before
        assert two.events is None and backends.all == [one]
    reader.close()
    raw.close()


def stored_batch(names: list[int]) -> bytes:
    from tests.kv_events.test_subscriber import batch, stored

    return batch(stored(*names))


@pytest.mark.slow
def test_a_server_tells_the_router_alone(checkpoint: Path) -> None:
    """And its events name the blocks that it tells."""
    port, reader, key = free_port(), EventReader(), FleetKey(SECRET)
    given = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"})
    body = {"input_ids": list(range(20, 100)), "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    flags = ("--kv-events-config", given, "--page-size", "16", "--max-total-tokens", "4096", "--api-key", "one")
    with RunningServer(checkpoint, *flags, env=KEY) as running:

        def ask(signature: bytes) -> httpx.Headers:
            headers = {"authorization": "Bearer one", "x-frame-blocks": signature.decode()}
            return httpx.post(f"{running.url}/generate", json=body, headers=headers, timeout=60).raise_for_status().headers

        told = httpx.get(f"{running.url}/health").headers["x-frame-events"]
        assert told == f"{port} 0 1"
        followed = CachedPrefixes(reader).follow(running.url, told)
        wait(lambda: followed.is_live)
        forged = FleetKey("some other key of a fleet").sign("/generate", "x-frame-blocks")
        for signature in (b"", b"1", forged, key.sign("/generate"), key.sign("/v1/completions", "x-frame-blocks")):
            assert "x-frame-blocks" not in ask(signature)
        blocks = read_blocks(ask(key.sign("/generate", "x-frame-blocks"))["x-frame-blocks"].encode())
        assert blocks is not None and (blocks.num_tokens, blocks.stride, len(blocks.hashes)) == (80, 16, 5)
        wait(lambda: set(blocks.hashes) <= {*followed.indexes[0], blocks.hashes[-1]})
    wait(lambda: not followed.is_live)
    reader.close()
