"""Unknown fields inside the objects of a body, unknown query parameters and repeated names."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from frame.entrypoints.http.chat.request_fields import CHAT as CHAT_SHAPES
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import MAX_NODES
from frame.entrypoints.http.protocol.fields import MAX_UNKNOWN, check_nested
from frame.entrypoints.http.validation_errors import repeated_name
from tests.entrypoints.inprocess import serving

HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    "/tokenize": {"messages": HI},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"model": "frame-tiny", "messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "frame-tiny", "messages": HI},
    "/v1/conversations": {},
    "/api/chat": {"model": "frame-tiny", "messages": HI, "stream": False, "options": {"num_predict": 2}},
}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


def tool(function: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**FUNCTION, **(function or {})}, **more}]}


@pytest.mark.parametrize(
    ("path", "fields", "place", "meant"),
    [
        (CHAT, tool({"strickt": True}), "tools[0].function.strickt", "strict"),
        (CHAT, tool({"parameter": {}}), "tools[0].function.parameter", "parameters"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": "x", "tool_cals": []}, *HI]}, "messages[1].tool_cals", "tool_calls"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "refusl": "b"}]}]},
         "messages[0].content[0].refusl", "refusal"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a", "tool_cals": []}]}, "messages[0].tool_cals", "tool_calls"),
        (RESPONSES, {"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        (RESPONSES, {"text": {"formatt": {"type": "json_object"}}}, "text.formatt", "format"),
        (RESPONSES, {"input": [{"role": "user", "content": "a", "statuss": "b"}]}, "input[0].statuss", "status"),
        (MESSAGES, {"output_config": {"formatt": {}}}, "output_config.formatt", "format"),
        (MESSAGES, {"thinking": {"type": "disabled", "budget_token": 1}}, "thinking.budget_token", "budget_tokens"),
        ("/v1/messages/count_tokens", {"tools": [{"name": "f", "input_schem": {}}]}, "tools[0].input_schem", "input_schema"),
        ("/v1/conversations", {"items": [{"role": "user", "content": "a", "statuss": "b"}]}, "items[0].statuss", "status"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "tool_cals": []}]}, "messages[0].tool_cals", "tool_calls"),
    ],
)  # fmt: skip
async def test_misspelt_nested_names_are_refused(path: str, fields: dict[str, Any], place: str, meant: str) -> None:
    async with serving() as server:
        reply = await server.post(path, {**BODIES[path], **fields})
        assert reply.status == 400, reply.body
        assert f"{place} is not a known field; did you mean {meant}?" in reply.body.decode()


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, tool(strict=True), "tools[0].strict"),
        (CHAT, {"frob": 1, **tool({"x y": 1}, zig=1)}, "frob, tools[0].zig, tools[0].function.x?y"),
        (CHAT, {"messages": [{**HI[0], "frob": 1}] * 40}, "messages[0].frob"),  # the first place of each
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "frob": 1}]}]}, "messages[0].content[0].frob"),
        (RESPONSES, {"reasoning": {"banana": 1, "summary": "auto"}, "text": {"verbosity": "low"}},
         "reasoning.banana, reasoning.summary"),
        (RESPONSES, {"reasoning": {"summary": None}, "text": {"verbosity": "medium"}}, None),
        (MESSAGES, {"output_config": {"banana": 1}, "thinking": {"type": "disabled", "budget": 1}},
         "thinking.budget, output_config.banana"),
        (f"{CHAT}?max_tokens=1&foo=2", {}, "query.max_tokens, query.foo"),
        (f"{MESSAGES}?beta=true", {}, None),
    ],
)  # fmt: skip
async def test_other_nested_names_are_reported(path: str, fields: dict[str, Any], ignored: str | None) -> None:
    async with serving() as server:
        reply = await server.post(path, {**BODIES[path.partition("?")[0]], **fields})
        assert reply.status == 200, reply.body
        found = reply.headers.get("x-frame-ignored-fields")
        assert sorted((found or "").split(", ")) == sorted((ignored or "").split(", "))


CLIENTS: dict[str, dict[str, Any]] = {  # what clients send besides what they ask for
    CHAT: {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "name": "n"},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
             "reasoning_content": "r", "tool_calls": [{"id": "c", "type": "function", "index": 0,
             "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "x"}, *HI,
        ],
        **tool({"strict": False, "description": "d"}, cache_control={"type": "ephemeral"}), "tool_choice": "auto",
    },
    RESPONSES: {  # Codex CLI
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "content": None,
             "encrypted_content": None},
            {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "message", "id": "m", "role": "assistant", "status": "completed", "phase": None,
             "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
            {"role": "user", "content": "go"},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "strict": False,
                   "parameters": {"type": "object", "properties": {}}}],
        "reasoning": {"effort": "medium", "summary": None}, "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
    },
    MESSAGES: {  # Claude Code
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "citations": None}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
             {"type": "tool_use", "id": "i", "name": "f", "input": {"anything": 1}, "caller": {"type": "direct"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "is_error": False,
             "content": [{"type": "text", "text": "r"}], "cache_control": {"type": "ephemeral"}}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}, "eager_input_streaming": True}],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "output_config": {"effort": "high"},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", CLIENTS)
async def test_what_clients_send_is_known(path: str) -> None:
    async with serving() as server:
        reply = await server.post(path, {**BODIES[path], **CLIENTS[path]})
        assert reply.status == 200, reply.body
        assert "x-frame-ignored-fields" not in reply.headers


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"reasoning_effort": "hihg"}, "reasoning_effort"),
        ("/tokenize", {"reasoning_effort": "hihg"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "hihg"}}, "reasoning.effort"),
        ("/api/chat", {"think": "hihg"}, "think"),
    ],
)
async def test_an_effort_is_one_of_a_list(path: str, fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        reply = await server.post(path, {**BODIES[path], **fields})
        assert reply.status == 400
        assert f"{param} is 'hihg'; it must be " in reply.body.decode()
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
            same: Any = {"effort": effort} if "." in param else effort
            assert (await server.post(path, {**BODIES[path], param.partition(".")[0]: same})).status == 200


async def test_query_parameters_are_suggested_and_counted() -> None:
    async with serving() as server:
        reply = await server.request("GET", "/v1/responses/resp_1?streams=true")
        assert reply.json()["error"]["message"] == "streams is no query parameter of this route; did you mean stream?"
        for many in (MAX_UNKNOWN + 1, 100):
            path = "/health?" + "&".join(f"name{i}=1" for i in range(many))
            assert (await server.request("GET", path)).status == 400


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"messages": [], "max_tokens": 2, "max_tokens": 3}', "max_tokens"),
        ('{"messages": [{"role": "user", "content": "a", "rol\\u0065": "b"}]}', "role"),
        ('{"a": ":", "messages": [{"b": "\\":"}], "a": 1}', "a"),
    ],
)
async def test_repeated_names_are_refused(text: str, name: str) -> None:
    async with serving() as server:
        reply = await server.request("POST", CHAT, text.encode())
        assert (reply.status, reply.json()["error"]["param"]) == (400, name)
        assert f"the body has {name} twice in one object" in reply.json()["error"]["message"]


def test_equal_names_of_different_objects_are_not_repeated() -> None:
    text = b'{"a": {"a": [{"a": ":"}, {"a": "\\\\"}, [1, 2]]}, "b\\"": {}, ":": "{\\"a\\": 1}"}'
    assert repeated_name(text, msgspec.json.decode(text)) is None


def test_the_time_for_nested_names_is_bounded() -> None:
    """A body of the largest size with nothing but small objects or unknown names."""
    small = {"messages": [{"role": "user", "content": [{}] * (MAX_NODES - 8)}]}
    deep = {"messages": [{"content": [{"frob": 1}]} for _ in range(MAX_NODES // 5)]}
    for body in (small, deep):
        assert _seconds(lambda body=body: check_nested(CHAT_SHAPES, body)) < 0.04
    many = {"messages": [{f"name{i}": 1} for i in range(MAX_NODES // 2)]}

    def refused() -> None:
        with pytest.raises(ApiError, match="unknown fields"):
            check_nested(CHAT_SHAPES, many)

    assert _seconds(refused) < 0.04


def _seconds(act: Any) -> float:
    found = []
    for _ in range(3):
        start = time.thread_time()
        act()
        found.append(time.thread_time() - start)
    return min(found)
