"""Fields of all protocols that keep a prefix, what they ask of the engine, and `usage`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.core.messages import SessionPin
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.session_store import MAX_REQUESTS, MAX_SESSIONS, Continuation, SessionStore
from tests.entrypoints.inprocess import InProcess, serving

TEXT = "a prompt of some length that fills several pages of the cache, again and again; " * 3
CHAT = {"model": "frame-tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
PLAIN = {"model": "frame-tiny", "prompt": TEXT, "max_tokens": 4}
NATIVE = {"text": TEXT, "sampling_params": {"max_new_tokens": 4}}
RESPONSE = {"model": "frame-tiny", "input": TEXT, "max_output_tokens": 16}
OLLAMA = {"model": "frame-tiny", "stream": False, "options": {"num_predict": 4}}
BLOCK = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
SENT: list[tuple[str, dict[str, Any], dict[str, str], str | None, float]] = [
    ("/v1/chat/completions", CHAT | {"prompt_cache_key": "k"}, {}, "k", 300.0),
    ("/v1/chat/completions", CHAT | {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, {}, "k", 86400.0),
    ("/v1/chat/completions", CHAT | {"prompt_cache_retention": "in_memory"}, {}, None, 300.0),
    ("/v1/completions", PLAIN | {"session_id": "s"}, {}, "s", 300.0),
    ("/v1/completions", PLAIN, {"x_session_id": "h"}, "h", 300.0),
    ("/v1/completions", PLAIN | {"session_id": "s"}, {"x_session_id": "h"}, "s", 300.0),
    ("/generate", NATIVE, {"x_session_id": "h"}, "h", 300.0),
    ("/v1/responses", RESPONSE | {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, {}, "k", 86400.0),
    ("/v1/messages", CHAT | {"cache_control": {"type": "ephemeral"}}, {}, None, 300.0),
    ("/v1/messages", CHAT | {"messages": [{"role": "user", "content": [BLOCK]}]}, {}, None, 3600.0),
    ("/v1/messages", CHAT | {"system": [BLOCK]}, {"x_session_id": "h"}, "h", 3600.0),
    ("/api/chat", OLLAMA | {"messages": CHAT["messages"], "session_id": "s"}, {}, "s", 300.0),
    ("/api/generate", OLLAMA | {"prompt": TEXT, "prompt_cache_key": "k", "prompt_cache_retention": "24h"}, {}, "k", 86400.0),
    ("/api/generate", OLLAMA | {"prompt": TEXT, "raw": True, "session_id": "s"}, {}, "s", 300.0),
]


async def send(server: InProcess, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = await server.post(path, body, **headers)
    assert response.status == 200, response.body
    found: dict[str, Any] = response.json()
    return found


async def test_fields_of_all_protocols_keep_a_prefix() -> None:
    async with serving() as server:
        for path, body, headers, session, seconds in SENT:
            await send(server, path, body, **headers)
            pin = server.sent[-1].pin
            assert isinstance(pin, SessionPin), path
            assert (pin.tenant, pin.seconds) == ("", seconds), path
            assert pin.session == session if session else pin.session.startswith("\0"), path
        await send(server, "/v1/chat/completions", CHAT | {"user": "x"})
        assert server.sent[-1].pin is None
        assert server.engine.scheduler.get_load()["pins"] > 0  # type: ignore[attr-defined]


async def test_a_previous_response_keeps_its_conversation() -> None:
    async with serving() as server:
        first = await send(server, "/v1/responses", RESPONSE)
        assert server.sent[-1].pin is None
        second = await send(server, "/v1/responses", RESPONSE | {"previous_response_id": first["id"]})
        assert server.sent[-1].pin is not None
        details = second["usage"]["input_tokens_details"]
        assert details["cached_tokens"] > 0
        assert details["cached_tokens"] + details["cache_write_tokens"] <= second["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/chat/completions", CHAT | {"prompt_cache_retention": "2h"}, "prompt_cache_retention is '2h'; it must be in_memory or 24h"),
        ("/v1/completions", PLAIN | {"session_id": "x" * 300}, "session_id has 300 characters; it may have 256"),
        ("/v1/completions", PLAIN | {"prompt_cache_key": "a\nb"}, "prompt_cache_key holds a character that is not printable"),
        ("/v1/messages", CHAT | {"cache_control": {"type": "x"}}, "cache_control.type is 'x'; it must be ephemeral"),
        ("/v1/messages", CHAT | {"system": [BLOCK | {"cache_control": {"ttl": 7}}]}, "system[0].cache_control.ttl is"),
        ("/v1/chat/completions", CHAT | {"session_params": {"id": "x"}}, "use /generate"),
        ("/generate", NATIVE | {"session_params": {"id": "none"}}, "session 'none' is not open"),
        ("/generate", NATIVE | {"session_params": {"id": "x", "rids": "y"}}, "session_params.rids"),
        ("/open_session", {"capacity_of_str_len": 0}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 9, "timeout": 1e9}, "timeout is 1e+09; it must be a number from 1 to 86400"),
        ("/open_session", {"capacity_of_str_len": 9, "session_id": ""}, "session_id is empty"),
    ],
)
async def test_wrong_values_are_named(path: str, body: dict[str, Any], sentence: str) -> None:
    async with serving() as server:
        response = await server.post(path, body)
        assert response.status == 400
        assert sentence in response.body.decode().replace('\\"', "'")


async def test_usage_tells_what_was_read_and_written() -> None:
    async with serving() as server:
        body = PLAIN | {"session_id": "s"}
        first, second = [(await send(server, "/v1/completions", body))["usage"] for _ in range(2)]
        whole = first["prompt_tokens"] // 16 * 16
        assert first["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": whole}
        assert second["prompt_tokens_details"] == {"cached_tokens": whole, "cache_write_tokens": 0}
        assert "cache_write_tokens" not in (await send(server, "/v1/completions", PLAIN))["usage"]["prompt_tokens_details"]
        control = {"cache_control": {"type": "ephemeral"}}
        other = [{"role": "user", "content": "something else " + TEXT}]
        wrote, read = [(await send(server, "/v1/messages", CHAT | control | {"messages": other}))["usage"] for _ in range(2)]
        assert wrote["cache_creation_input_tokens"] > 0
        assert read["cache_read_input_tokens"] >= wrote["cache_creation_input_tokens"]
        total = [sum(usage[name] for name in usage if name != "output_tokens") for usage in (wrote, read)]
        assert total[0] == total[1]


async def test_nothing_is_kept_where_the_share_is_0() -> None:
    async with serving({"cache": {"session_share": 0}}) as server:
        await send(server, "/v1/completions", PLAIN | {"session_id": "s"})
        assert server.engine.scheduler.get_load()["pins"] == 0  # type: ignore[attr-defined]


# SGLang's sessions --------------------------------------------------------------------------------


async def test_a_session_continues_from_an_earlier_request() -> None:
    async with serving() as server:
        reply = await server.post("/open_session", {"capacity_of_str_len": 1000, "timeout": 60, "streaming": True})
        name, ignored = reply.json(), reply.headers["x-frame-ignored-fields"]
        assert ignored == "streaming"

        async def ask(ids: list[int], **params: Any) -> dict[str, Any]:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}}
            return await send(server, "/generate", body | {"session_params": {"id": name, **params}})

        start = list(range(10, 50))
        first = await ask(start)
        assert server.sent[-1].token_ids == start
        assert server.sent[-1].pin == SessionPin("", str(name), 60.0)
        rid, output = first["meta_info"]["id"], first["output_ids"]
        second = await ask([1, 2], rid=rid)
        assert server.sent[-1].token_ids == [*start, *output, 1, 2]
        assert second["meta_info"]["cached_tokens"] == 32
        await ask([3], rid=rid, drop_previous_output=True)
        assert server.sent[-1].token_ids == [*start, 3]
        await ask([4], rid=rid, offset=5)
        assert server.sent[-1].token_ids == [*start[:5], 4]
        refused = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4, "temperature": -1}}
        for fields in ({"rid": rid, "replace": True}, {"replace": True}):  # forgets nothing
            assert (await server.post("/generate", refused | {"session_params": {"id": name, **fields}})).status == 400
        server.services.draining = True
        assert (await server.post("/generate", {"input_ids": [5], "session_params": {"id": name, "replace": True}})).status == 503
        server.services.draining = False
        await ask([2], rid=second["meta_info"]["id"])
        await ask([5], rid=rid, replace=True)
        response = await server.post("/generate", {"input_ids": [1], "session_params": {"id": name, "rid": second["meta_info"]["id"]}})
        assert response.status == 400
        assert "has no finished request" in response.body.decode()
        text = await send(server, "/generate", {"text": "more", "session_params": {"id": name, "rid": rid}})
        assert server.sent[-1].token_ids[: len(start) + 4] == [*start, *output]
        assert text["meta_info"]["prompt_tokens"] > len(start) + 4
        assert (await server.post("/open_session", {"capacity_of_str_len": 9, "session_id": name})).status == 400
        assert await send(server, "/close_session", {"session_id": name}) == {"session_id": name}
        assert server.engine.scheduler.get_load()["pins"] == 0  # type: ignore[attr-defined]
        assert (await server.post("/close_session", {"session_id": name})).status == 404
        assert not server.services.sessions._sessions


async def test_a_session_stays_open_while_its_request_runs() -> None:
    now = [0.0]
    async with serving() as server:
        server.services.sessions._clock = lambda: now[0]
        name = (await server.post("/open_session", {"capacity_of_str_len": 1000, "timeout": 1})).json()
        body = {"input_ids": [10, 11, 12], "sampling_params": {"max_new_tokens": 4}, "session_params": {"id": name}}
        await server.services.client.send_command("pause")
        asked = asyncio.create_task(send(server, "/generate", body))
        async with asyncio.timeout(20):
            while not server.services.client.num_outstanding:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        now[0] = 100.0
        await server.services.client.send_command("resume")
        first = await asked
        now[0] = 100.9
        await send(server, "/generate", body | {"session_params": {"id": name, "rid": first["meta_info"]["id"]}})
        now[0] = 102.0
        assert (await server.post("/generate", body)).status == 400


def test_the_store_is_bounded() -> None:
    now = [0.0]
    store = SessionStore(lambda: now[0])
    for number in range(MAX_SESSIONS):
        store.open_session("a", f"s{number}", 100, 60.0)
    with pytest.raises(ApiError) as refused:
        store.open_session("a", None, 100, 60.0)
    assert refused.value.status == 429
    store.open_session("b", "s0", 100, 60.0)
    for number in range(2 * MAX_REQUESTS):
        store.add_request("a", Continuation("s0"), f"r{number}", [1, 2], [3])
    store.add_request("a", Continuation("s0"), "long", [1] * 101, [])
    assert len(store._sessions["a"]["s0"].requests) == MAX_REQUESTS
    with pytest.raises(ApiError, match="no finished request 'r1'"):
        store.read_history("b", Continuation("s0", "r1"))
    assert store.read_history("a", Continuation("s0", f"r{2 * MAX_REQUESTS - 1}")) == [1, 2, 3]
    with pytest.raises(ApiError, match="offset is 4, and the request before has 3 tokens"):
        store.read_history("a", Continuation("s0", f"r{2 * MAX_REQUESTS - 1}", offset=4))
    now[0] = 61.0
    store.open_session("a", "new", 100, 60.0)
    assert list(store._sessions["a"]) == ["new"]


def test_a_tenants_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.entrypoints.http.protocol.session_store.MAX_TOKENS", 100)
    store = SessionStore()
    for number in range(5):
        store.open_session("a", f"s{number}", 1000, 60.0)
        store.add_request("a", Continuation(f"s{number}"), "r", [0] * 40, [])
    assert sum(each.num_tokens for each in store._sessions["a"].values()) <= 100
    assert "s4" in store._sessions["a"]
