"""Requests are ended by the id of their response or by their rid, which are names of one tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.inprocess import InProcess, Response, serving

HI = [{"role": "user", "content": "hi"}]
REPLIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"model": "frame-tiny", "messages": HI, "max_tokens": 200},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 200}},
}
ONE, OTHER, OPERATOR = "Bearer one", "Bearer other", "Bearer operator"


@asynccontextmanager
async def two_tenants(folder: Path, **more: Any) -> AsyncIterator[InProcess]:
    """A server with two users' keys and an operator's, whose engine launches no step."""
    keys = folder / "keys"
    keys.write_text("one\nother\n")
    async with serving({"server": {"api_keys": str(keys), "admin_key": "operator", **more}}) as server:
        await server.services.client.send_command("pause")
        yield server


async def started(server: InProcess, path: str, body: Any, **headers: str) -> asyncio.Task[Response]:
    count = server.services.client.num_outstanding
    task = asyncio.create_task(server.post(path, body, **headers))
    for _ in range(1000):
        if task.done() or server.services.client.num_outstanding > count:
            break
        await asyncio.sleep(0)
    return task


async def abort(server: InProcess, key: str, **body: Any) -> Response:
    return await server.post("/abort_request", body, authorization=key)


@pytest.mark.parametrize("path", REPLIES)
@pytest.mark.parametrize("name", ["rid", "request_id"])
async def test_the_name_that_the_client_gave_is_the_responses_id(tmp_path: Path, path: str, name: str) -> None:
    async with two_tenants(tmp_path) as server:
        task = await started(server, path, {**REPLIES[path], name: "job"}, authorization=ONE)
        assert (await abort(server, ONE, rid="job")).json() == {"success": True, "aborted": 1}
        found = (await task).json()
        if path != "/v1/messages":  # where an aborted message is an error
            assert (found["meta_info"] if path == "/generate" else found)["id"] == "job"


async def test_a_response_is_ended_by_its_id(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as server:
        task = await started(server, "/v1/chat/completions", {"messages": HI, "n": 2}, authorization=ONE, x_request_id="trace")
        (name,) = {sequence.request.rid for sequence in server.services.client._sequences.values()}
        assert name.startswith("chatcmpl-trace-")
        assert (await abort(server, ONE, rid=[name, "unknown"])).json()["aborted"] == 2
        found = (await task).json()
        assert found["id"] == name
        assert [choice["finish_reason"] for choice in found["choices"]] == ["abort", "abort"]


async def test_a_stream_says_the_name_that_ends_it() -> None:
    async with serving() as server:
        for path, prefix in (("/v1/chat/completions", "chatcmpl-"), ("/v1/completions", "cmpl-"), ("/v1/messages", "msg_")):
            found = (await server.post(path, {**REPLIES[path], "max_tokens": 1})).json()
            assert found["id"].startswith(prefix)


async def test_unknown_names_are_404(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as server:
        for key in (ONE, OPERATOR):
            reply = await abort(server, key, rid="unknown")
            assert (reply.status, reply.json()["error"]["code"]) == (404, "request_not_found")
            assert (await abort(server, key, abort_all=True)).json()["aborted"] == 0
            assert (await abort(server, key)).status == 400
        assert (await server.post("/abort_request", {"rid": "unknown"})).status == 401


async def test_names_belong_to_a_tenant(tmp_path: Path) -> None:
    """Two keys use one name, and each ends its own request alone."""
    async with two_tenants(tmp_path) as server:
        body = {"prompt": "hi", "rid": "job"}
        mine = await started(server, "/v1/completions", body, authorization=ONE)
        theirs = await started(server, "/v1/completions", body, authorization=OTHER)
        assert not theirs.done()
        again = await server.post("/v1/completions", body, authorization=ONE)
        assert (again.status, again.json()["error"]["param"]) == (400, "rid")
        assert "'job'" in again.json()["error"]["message"]
        assert (await abort(server, ONE, abort_all=True)).json()["aborted"] == 1
        assert (await mine).json()["choices"][0]["finish_reason"] == "abort"
        assert (await abort(server, ONE, rid="job")).status == 404
        assert not theirs.done()
        assert (await abort(server, OPERATOR, rid="job")).json()["aborted"] == 1
        assert (await theirs).json()["id"] == "job"


async def test_a_key_without_a_free_place_may_abort(tmp_path: Path) -> None:
    async with two_tenants(tmp_path, max_requests_per_key=1) as server:
        task = await started(server, "/v1/completions", {"prompt": "hi", "rid": "job"}, authorization=ONE)
        assert (await server.post("/v1/completions", {"prompt": "hi"}, authorization=ONE)).status == 429
        assert (await abort(server, ONE, rid="job")).status == 200
        await task
