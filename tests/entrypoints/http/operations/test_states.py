"""The fields of the pause and sleep routes, as SGLang's and vLLM's clients send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frame.entrypoints.http.operations.states import router
from frame.entrypoints.http.protocol.api_route import Access
from tests.entrypoints.inprocess import InProcess, serving

JSON = [(b"content-type", b"application/json")]


async def post(server: InProcess, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    reply = await server.request("POST", path, b"" if body is None else json.dumps(body).encode(), JSON)
    return reply.status, json.loads(reply.body)


async def test_pauses_of_both_dialects() -> None:
    async with serving() as server:

        async def state() -> Any:
            info = (await server.services.client.send_command("server_info")).data
            paused = json.loads((await server.request("GET", "/is_paused")).body)["is_paused"]
            assert paused == info["paused"]
            return info["pause_mode"]

        for body, mode in ((None, "abort"), ({}, "abort"), ({"mode": "in_place"}, "keep"), ({"mode": "retract"}, "retract")):
            assert await post(server, "/pause_generation", body) == (200, {"success": True, "num_preempted": 0})
            assert await state() == mode
            assert (await post(server, "/continue_generation", {}))[0] == 200
        for path, body, mode in (
            ("/pause", None, "abort"),
            ("/pause?mode=keep&clear_cache=false", None, "keep"),
            ("/pause?wait_for_inflight_requests=true", None, "wait"),
            ("/pause", {"mode": "wait", "clear_cache": True}, "wait"),
            ("/pause?mode=keep", {"mode": "wait"}, "keep"),
        ):
            assert await post(server, path, body) == (200, {"status": "paused"})
            assert await state() == mode
            assert await post(server, "/resume") == (200, {"status": "resumed"})
        for path in ("/resume", "/continue_generation"):
            status, body = await post(server, path)
            assert status == 409 and "pause it first" in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", {"mode": "later"}, "mode"),
        ("/pause?mode=in_place", None, "mode"),
        ("/sleep?level=two", None, "level"),
        ("/release_memory_occupation", {"tags": "weights"}, "tags"),
        ("/pause_generation", {"modes": "abort"}, "modes"),
    ],
)
async def test_bad_fields_are_named(path: str, body: Any, param: str) -> None:
    async with serving() as server:
        status, reply = await post(server, path, body)
        assert status == 400 and param in json.dumps(reply["error"])


async def test_an_engine_that_cannot_sleep() -> None:
    async with serving() as server:
        for path in ("/sleep", "/sleep?level=2&mode=keep&tags=weights", "/release_memory_occupation"):
            status, reply = await post(server, path)
            assert status == 409 and "cannot release its memory" in reply["error"]["message"]
        for path in ("/wake_up", "/wake_up?tags=weights&tags=kv_cache", "/resume_memory_occupation"):
            status, reply = await post(server, path)
            assert status == 409 and "not asleep" in reply["error"]["message"]
        status, reply = await post(server, "/resume_memory_occupation", {"tags": ["cuda_graph"]})
        assert status == 400 and reply["error"]["message"] == "tags has 'cuda_graph'; it may have weights, kv_cache"
        assert json.loads((await server.request("GET", "/is_sleeping")).body) == {"is_sleeping": False}


def test_operators_alone_may_use_them() -> None:
    assert {route.access for route in router.api_routes} == {Access.ADMIN}
