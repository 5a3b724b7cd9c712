"""Routing policies behind sockets: what the router passes to them, and what it does when one
fails."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping

import pytest

from frame.core.errors import ConfigError, PluginError
from frame.entrypoints.router.replicas import counted
from frame.entrypoints.router.server import load_policy
from frame.interfaces.routing import RoutingContext, RoutingPolicy, RoutingRequest
from frame.plugins.routing_policies.session import Session
from tests.entrypoints.router.fake_replica import FakeReplica, routed

BODY = {"prompt": "a prompt " * 100, "kind": "whole"}


class Recording(RoutingPolicy):
    """Records what it is asked, and follows `script`."""

    def __init__(self, *script: object) -> None:
        super().__init__(RoutingContext())
        self.script, self.requests, self.loads = list(script), list[RoutingRequest](), list[Mapping[int, int]]()

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        self.requests.append(request)
        self.loads.append(loads)
        step = self.script.pop(0) if self.script else 0
        if isinstance(step, Exception):
            raise step
        return step  # type: ignore[return-value]


async def test_a_policy_sees_blocks_session_and_healthy_replicas() -> None:
    policy = Recording(1)
    async with routed(FakeReplica(), FakeReplica(), policy=policy) as (client, _, _):
        reply = await client.post("/v1/completions", json=BODY, headers={"X-Session-ID": "talk 7"})
        assert reply.status_code == 200
        await client.get("/v1/models")
    first, second = policy.requests
    assert (len(first.blocks), first.session) == (3, "talk 7")
    assert (list(second.blocks), second.session) == ([], "")
    assert policy.loads == [{0: 0, 1: 0}, {0: 0, 1: 0}]


async def test_sessions_stay_on_one_replica() -> None:
    replicas = [FakeReplica() for _ in range(3)]
    async with routed(*replicas, policy=Session(RoutingContext())) as (client, _, _):
        homes: dict[str, set[int]] = {}
        for turn in range(4):
            for talk in range(6):
                text = f"{turn} {talk} " * 200
                before = [each.requests for each in replicas]
                await client.post("/v1/completions", json={**BODY, "prompt": text}, headers={"X-Session-ID": f"{talk}"})
                (home,) = [number for number, each in enumerate(replicas) if each.requests > before[number]]
                homes.setdefault(f"{talk}", set()).add(home)
    assert all(len(home) == 1 for home in homes.values())
    assert len({*map(tuple, homes.values())}) > 1


@pytest.mark.parametrize("step", [RuntimeError("boom"), 7, None, "0"])
async def test_a_policy_that_fails_is_named_and_replaced(step: object, caplog: pytest.LogCaptureFixture) -> None:
    policy = Recording(step, 1)
    with caplog.at_level(logging.ERROR):
        async with routed(FakeReplica(), FakeReplica(), policy=policy) as (client, _, _):
            for _ in range(3):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert len(policy.requests) == 1
    named = [record for record in caplog.records if "least load" in record.getMessage()]
    assert len(named) == 1 and "Recording" in named[0].getMessage()


def test_a_policy_of_the_command_line() -> None:
    assert type(load_policy(None, [])()).__name__ == "PrefixLoad"
    assert type(load_policy("session", [])()).__name__ == "Session"
    with pytest.raises(PluginError, match="Unknown routing_policy 'sesion'; did you mean 'session'"):
        load_policy("sesion", [])
    with pytest.raises(PluginError, match="round_robin takes no options"):
        load_policy("round_robin", ["x=1"])
    with pytest.raises(ConfigError, match="--policy-option is 'x'; write KEY=VALUE"):
        load_policy("round_robin", ["x"])


def test_a_refused_prompt_is_not_cached() -> None:
    """A policy forgets what it noted for a request that the replica refused, and keeps what the
    replica had before."""
    policy, loads = load_policy(None, [])(), {0: 0, 1: 0}
    assert policy.choose_replica(RoutingRequest([1, 2]), {1: 0}) == 1
    refused = RoutingRequest([1, 2, 3, 4])
    assert policy.choose_replica(refused, loads) == 1
    policy.forget_request(refused, 1)
    assert policy.choose_replica(RoutingRequest([1, 2, 9]), loads) == 1
    assert policy.choose_replica(RoutingRequest([3, 4]), loads) == 0


@pytest.mark.parametrize("status", [400, 503])
async def test_a_replica_that_refuses_does_not_attract_its_prompts(status: int) -> None:
    first, second = FakeReplica(), FakeReplica()
    async with routed(first, second) as (client, backends, _):
        first.status = status
        assert (await client.post("/v1/completions", json=BODY)).status_code == (status if status == 400 else 200)
        first.status = 200
        with counted(backends.all[0]) if status == 400 else contextlib.nullcontext():  # equal but for what is cached
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert (first.requests, second.requests) == (1, 1 if status == 400 else 2)


def test_events_are_read_for_policies_that_look_at_prefixes() -> None:
    assert {name: load_policy(name, []).reads_caches for name in (None, "prefix_load", "least_load", "round_robin", "session")} == {
        None: True, "prefix_load": True, "least_load": False, "round_robin": False, "session": False,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["least_load", "round_robin", "power_of_two"])
async def test_all_replicas_are_used(name: str) -> None:
    replicas = [FakeReplica() for _ in range(3)]
    async with routed(*replicas, policy=load_policy(name, [])()) as (client, _, _):
        for number in range(24):
            await client.post("/v1/completions", json={**BODY, "prompt": f"{number}" * 300})
    got = Counter({number: each.requests for number, each in enumerate(replicas)})
    assert sum(got.values()) == 24
    assert name == "least_load" or len(+got) == 3  # one at a time: the first is always the least loaded


@pytest.mark.slow
def test_the_command_refuses_an_unknown_policy() -> None:
    command = [sys.executable, "-m", "frame", "router", "--replica", "http://127.0.0.1:1", "--policy", "nearest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 78, done.stderr
    assert "Unknown routing_policy 'nearest'" in done.stderr
    assert "Traceback" not in done.stderr


async def test_an_adapter_stays_on_its_replica() -> None:
    """Once a response has named the adapter of a model, its requests go where the others went, and
    those to the base model where the load is least."""
    first, second = FakeReplica(), FakeReplica()
    first.adapters = second.adapters = ("sql",)
    async with routed(first, second) as (client, backends, _):
        with counted(backends.all[0]):  # it is busy
            for text in ("a", "b"):  # the response to the first one names the adapter
                await client.post("/v1/completions", json={"prompt": text, "model": "sql"})
        for text, fields in (("c", {"model": "sql"}), ("d" * 900, {"model": "sql"}), ("e", {"model": "base"}), ("f", {})):
            assert (await client.post("/v1/completions", json={"prompt": text, **fields})).status_code == 200
    assert (first.models, second.models) == (["base", ""], ["sql"] * 4)
