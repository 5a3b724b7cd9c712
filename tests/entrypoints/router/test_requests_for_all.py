"""Requests that `frame router` sends to all replicas: whom they reach, and what the response says
of replicas that have not done it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.entrypoints.router.fake_replica import FakeReplica, raw_replica, routed


class Server(FakeReplica):
    """Answers every request with `status`, and keeps the paths."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    async def _reply(self, scope: Any, body: bytes, send: Any) -> None:
        self.paths.append(scope["path"])
        await self._send(send, self.status, b'{"error": {"message": "no"}}' if self.status >= 400 else b"{}")


@pytest.mark.parametrize("state", ["lost", "joining"])
@pytest.mark.parametrize("path", ["/flush_cache", "/update_weights_from_disk", "/v1/load_lora_adapter"])
async def test_a_replica_that_gets_no_request_for_all_is_named(path: str, state: Any) -> None:
    """It would serve with the old state later."""
    replica, absent = Server(), "http://127.0.0.1:9"
    async with routed(replica, urls=(absent,)) as (client, backends, _):
        backends.all[0].state = state
        reply = await client.post(path, json={})
        sentence = f"replica {absent} is {state}; 1 of 2 replicas have done it"
        assert (reply.status_code, reply.json()["error"]["message"], replica.paths) == (502, sentence, [path])
        backends.all[1].state = "joining"
        reply = await client.post(path, json={})
        assert (reply.status_code, f"replica {absent} is {state}; replica {replica.url} is joining" in reply.text) == (503, True)
        backends.all[1].state = "serving"
        backends.remove(backends.all[0])  # for good: its state is of no use any more
        assert (await client.post(path, json={})).status_code == 200


async def test_each_replica_that_fails_is_named_with_what_it_says() -> None:
    """Bytes that are no HTTP are not quoted; the same refusal of all passes as it came."""
    first, second, third = Server(), Server(), Server()
    broken_reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nSECRET\r\n"
    async with raw_replica(broken_reply) as broken, routed(first, second, third, urls=(broken,)) as (client, backends, _):
        second.status = 400
        reply = await client.post("/flush_cache", json={})
        sentence = f"replica {second.url} answers 400: no; replica {broken} is lost: RemoteProtocolError; 2 of 4 replicas have done it"
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, sentence)
        backends.remove(backends.all[0])
        first.status = third.status = 400
        reply = await client.post("/flush_cache", json={})
        assert (reply.status_code, reply.text) == (400, '{"error": {"message": "no"}}')
        third.status = 503
        reply = await client.post("/flush_cache", json={})
        sentence = "; ".join(f"replica {each.url} answers {each.status}: no" for each in (first, second, third))
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, f"{sentence}; 0 of 3 replicas have done it")
        await third.kill()
        second.status = first.status = 200
        reply = await client.post("/flush_cache", json={})
        sentence = f"replica {third.url} is lost: it does not accept connections; 2 of 3 replicas have done it"
        assert (reply.status_code, reply.json()["error"]["message"]) == (502, sentence)


class Holder(Server):
    """Has the request "here" and aborts it once."""

    def __init__(self) -> None:
        super().__init__()
        self.held = set[str]()

    async def _reply(self, scope: Any, body: bytes, send: Any) -> None:
        fields = json.loads(body)
        rid, has_all = fields.get("rid", ""), fields.get("abort_all", False)
        is_there = rid in self.held or has_all
        self.held.discard(rid)
        await self._send(send, 200 if is_there else 404, b"{}" if is_there else b'{"error": {"message": "none"}}')


async def test_a_request_on_a_draining_replica_is_aborted() -> None:
    """After SIGTERM, after an operator removed it, and after it was added again and no check has
    succeeded yet."""
    first, second = Holder(), Holder()
    async with routed(first, second, urls=("http://127.0.0.1:9",)) as (client, backends, _):
        await asyncio.gather(*(backends.check(backend, is_suspect=True) for backend in backends.all))
        assert backends.all[0].state == "lost"  # and was never up, so it has no request
        leaving = backends.all[1]
        for change in ("SIGTERM", "removed", "added again"):
            if change == "SIGTERM":
                leaving.state = "draining"
            elif change == "removed":
                backends.remove(leaving)
            else:
                backends.add(first.url, "admin")
                leaving.outstanding += 1
            first.held.add("here")
            aborted = await client.post("/abort_request", json={"rid": "here"})
            assert (aborted.status_code, first.held) == (200, set()), change
            again = await client.post("/abort_request", json={"rid": "here"})
            assert (again.status_code, again.text) == (404, '{"error": {"message": "none"}}'), change
        leaving.outstanding -= 1


async def test_a_lost_replica_may_have_the_request_to_abort() -> None:
    first, second = Holder(), Holder()
    async with routed(first, second) as (client, backends, _):
        await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        second.held.add("here")
        backends.mark_lost(backends.all[0], "it hangs")
        assert (await client.post("/abort_request", json={"rid": "here"})).status_code == 200
        unknown = await client.post("/abort_request", json={"rid": "here"})
        assert (unknown.status_code, f"replica {first.url} is lost; 0 of 2" in unknown.text) == (502, True)
        everything = await client.post("/abort_request", json={"abort_all": True})
        assert (everything.status_code, f"replica {first.url} is lost; 1 of 2" in everything.text) == (502, True)
