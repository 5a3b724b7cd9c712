"""A replica whose engine restarts answers its health checks with 503, and continues its requests:
they stay with it where no other one can take them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.entrypoints.router import replicas
from tests.entrypoints.router.fake_replica import FakeReplica, routed
from tests.entrypoints.router.test_membership import SilentReplica, reach, silence

STREAM: dict[str, Any] = {"prompt": "x", "stream": True}


async def fail_checks(backends: replicas.Backends, backend: replicas.Backend) -> None:
    for _ in range(replicas.PATIENCE):
        await backends.check(backend)
    assert backend.state == "lost"


async def test_streams_stay_with_a_replica_that_restarts() -> None:
    """Whether or not there is another one, and a request whose answer has not begun stays with the
    only one."""
    one, other = FakeReplica(), FakeReplica()
    one.token_pause = 0.3
    async with routed(one, other) as (client, backends, _):
        first, second = backends.all
        await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        second.state = "draining"
        stream = asyncio.create_task(client.post("/v1/completions", json=STREAM))
        await reach(lambda: bool(one.running))
        await asyncio.sleep(0.1)
        second.state, one.status = "serving", 503
        await fail_checks(backends, first)
        reply = await stream
        assert reply.status_code == 200 and reply.text.endswith("[DONE]\n\n") and "error" not in reply.text
        assert other.requests == 0
        second.state, one.status, one.slowness, one.token_pause = "draining", 200, 0.5, 0.0
        await backends.check(first)
        assert first.state == "serving"
        whole = asyncio.create_task(client.post("/v1/completions", json={"prompt": "y"}))
        await reach(lambda: bool(one.running))
        one.status = 503
        await fail_checks(backends, first)
        assert (await whole).status_code == 200


async def test_a_request_without_an_answer_goes_to_another_replica() -> None:
    one, other = FakeReplica(slowness=20.0), FakeReplica()
    async with routed(one, other) as (client, backends, _):
        first, second = backends.all
        await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        second.state = "draining"
        whole = asyncio.create_task(client.post("/v1/completions", json={"prompt": "y"}))
        await reach(lambda: bool(one.running))
        second.state, one.status = "serving", 503
        await fail_checks(backends, first)
        assert (await asyncio.wait_for(whole, 10)).status_code == 200 and other.requests == 1


async def test_a_restart_takes_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that, and where no connection is accepted any more, streams end with an error."""
    for is_killed in (False, True):
        one = FakeReplica()
        one.token_pause = 20.0
        async with routed(one) as (client, backends, _):
            backend = backends.all[0]
            await backends.check(backend)
            stream = asyncio.create_task(client.post("/v1/completions", json=STREAM))
            await reach(lambda replica=one: bool(replica.running))  # type: ignore[misc]
            await asyncio.sleep(0.1)
            one.status = 503
            await fail_checks(backends, backend)
            assert not backend.lost.is_set()
            if is_killed:
                await one.kill()
            else:
                monkeypatch.setattr(replicas, "MAX_RESTART", 0.0)
            await backends.check(backend)
            assert "was lost while it answered" in (await asyncio.wait_for(stream, 10)).text
            monkeypatch.undo()


async def test_one_that_wakes_first_does_not_make_the_others_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas of a machine were stopped: the first answer is no reason to give up the rest."""
    monkeypatch.setattr(replicas, "MIN_SILENCE", 0.25)
    three = [SilentReplica() for _ in range(3)]
    async with routed(*three) as (_, backends, _):
        await silence(three, backends)
        for _ in range(3):
            await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        pending = [asyncio.create_task(backends.check(backend)) for backend in backends.all]
        await asyncio.sleep(0.02)
        for replica in three[1:]:
            replica.speaks.set()
        await asyncio.gather(*pending)
        assert {backend.state for backend in backends.all} == {"serving"}
