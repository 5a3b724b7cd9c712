"""Routers that are replicas of themselves or of each other."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.entrypoints.router.fake_replica import FakeReplica, routed
from tests.entrypoints.router.test_membership import states


class Listener(FakeReplica):
    """Keeps the header `Via` of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.via: list[list[bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/health":
            self.via.append([value for name, value in scope["headers"] if name == b"via"])
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("source", ["admin", "a file"])
async def test_a_router_is_no_replica_of_itself(source: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    replica = FakeReplica()
    async with routed(replica) as (client, backends, _):
        own = str(client.base_url).rstrip("/")
        if source == "admin":
            backends.add(own, source)
        for _ in range(3):
            if source == "a file":
                backends.update(source, [own])
            await backends.check(backends.find(own) or backends.all[0])
            backends._drop_left()
        expected = {replica.url: "serving"} if source == "admin" else {replica.url: "serving", own: "draining"}
        assert (states(backends), [own in record.message for record in caplog.records]) == (expected, [True])
        assert (await client.post("/flush_cache", json={})).status_code == 200
        assert replica.requests == 1


async def test_a_request_that_comes_back_is_refused() -> None:
    """Two routers that have each other. A chain of routers is none."""
    replica = Listener()
    async with routed(replica) as (front, backends, _), routed() as (behind, others, _):
        there = backends.add(str(behind.base_url).rstrip("/"), "admin")
        others.add(replica.url, "admin")
        for group in (others, backends):
            await group.check(group.all[-1])
        backends.choose = lambda _, tried=(), *__: None if there.number in tried else there  # type: ignore[method-assign]
        reply = await front.post("/generate", json={"text": "x"}, headers={"via": "1.0 fred"})
        assert (reply.status_code, len(replica.via), replica.via[0][0], len({*replica.via[0]})) == (200, 1, b"1.0 fred", 3)
        back = others.add(str(front.base_url).rstrip("/"), "admin")
        await others.check(back)
        assert (there.state, back.state) == ("serving", "serving")
        others.choose = lambda _, tried=(), *__: None if back.number in tried else back  # type: ignore[method-assign]
        reply = await front.post("/generate", json={"text": "x"})
        assert (reply.status_code, "came back to this router" in reply.json()["error"]["message"]) == (508, True)
        reply = await front.post("/flush_cache", json={})
        assert (reply.status_code, len(replica.via)) == (508, 3)  # one request of each router
        assert f"replica {there.url} answers 508: " in reply.json()["error"]["message"]
