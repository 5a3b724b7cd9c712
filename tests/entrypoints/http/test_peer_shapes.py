"""Requests, responses and errors as clients of OpenAI, vLLM and Anthropic expect them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.http.chat.constraints import MAX_SUBSCHEMAS, check_schemas
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from tests.entrypoints.inprocess import serving

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, GENERATE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


async def test_top_k_0_is_off() -> None:
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)
    assert msgspec.convert({"top_k": 0}, SamplingParams).problems() == []
    async with serving() as server:
        assert (await server.post(CHAT, {"messages": HI, "max_tokens": 1, "top_k": 0})).status == 200
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 1, "top_k": 0}}
        assert (await server.post(GENERATE, body)).status == 200


async def test_model_aliases() -> None:
    async with serving({"model": {"served_name": "big", "served_aliases": ["gpt-4o", "small"]}}) as server:
        listed = (await server.request("GET", "/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["big", "gpt-4o", "small"]
        assert (await server.request("GET", "/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        for name, status in (("big", 200), ("small", 200), ("other", 404)):
            reply = await server.post(CHAT, {"messages": HI, "max_tokens": 1, "model": name})
            assert reply.status == status
            assert status != 200 or reply.json()["model"] == "big"


async def test_models_in_anthropic_shape() -> None:
    async with serving() as server:
        version = [(b"anthropic-version", b"2023-06-01")]
        found = (await server.request("GET", "/v1/models", headers=version)).json()
        assert {key: found[key] for key in ("has_more", "first_id", "last_id")} == {
            "has_more": False, "first_id": "frame-tiny", "last_id": "frame-tiny",
        }  # fmt: skip
        (card,) = found["data"]
        assert (card["type"], card["id"], card["display_name"]) == ("model", "frame-tiny", "frame-tiny")
        assert (await server.request("GET", "/v1/models/frame-tiny", headers=version)).json() == card


async def test_response_fields_that_clients_expect() -> None:
    async with serving() as server:
        chat = (await server.post(CHAT, {"messages": HI, "max_tokens": 2, "ignore_eos": True})).json()
        assert chat["service_tier"] == "default"
        assert chat["system_fingerprint"].startswith("frame-")
        assert chat["choices"][0]["message"]["refusal"] is None
        assert chat["choices"][0]["stop_reason"] is None
        again = (await server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2})).json()
        assert again["system_fingerprint"] == chat["system_fingerprint"]
        token = (await server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1, "return_token_ids": True, "seed": 5})).json()
        (first,) = token["choices"][0]["token_ids"]
        asked = {"prompt": "hi", "max_tokens": 9, "seed": 5, "stop_token_ids": [first]}
        assert (await server.post(COMPLETIONS, asked)).json()["choices"][0]["stop_reason"] == first
        events = (await server.post(COMPLETIONS, {**asked, "stream": True})).body.split(b"\n\n")
        assert f'"stop_reason":{first}'.encode() in events[-3]


async def test_tokenize_applies_the_fields_of_a_chat_request() -> None:
    async with serving() as server:

        async def tokens(**more: Any) -> list[int]:
            found: list[int] = (await server.post("/tokenize", {"messages": HI, **more})).json()["tokens"]
            return found

        begun, bare = await tokens(), await tokens(add_generation_prompt=False)
        assert begun[: len(bare)] == bare
        assert len(begun) > len(bare)
        usage = (await server.post(CHAT, {"messages": HI, "max_tokens": 1, "add_generation_prompt": False})).json()["usage"]
        assert usage["prompt_tokens"] == len(bare)
        for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]}), (GENERATE, {"text": "hi"})):
            assert (await server.post(path, {**body, "model": "frame-tiny"})).status == 200
            reply = await server.post(path, {**body, "model": "other"})
            assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_anthropic_request_id() -> None:
    async with serving() as server:
        for body in ({"model": "frame-tiny", "messages": HI, "max_tokens": 1}, {"model": "frame-tiny"}):
            reply = await server.post(MESSAGES, body)
            assert reply.headers["request-id"] == reply.headers["x-request-id"]


# functions, OpenAI's deprecated form of tools -----------------------------------------------------


def test_functions_are_tools() -> None:
    use = ChatRequest(messages=HI, functions=[FUNCTION], function_call={"name": "get_weather"}).resolve_tools()
    assert use == ChatRequest(messages=HI, tools=[TOOL], tool_choice=TOOL, parallel_tool_calls=False).resolve_tools()
    auto = ChatRequest(messages=HI, functions=[FUNCTION]).resolve_tools()
    assert auto is not None
    assert not auto.rule.is_required
    assert ChatRequest(messages=HI, functions=[FUNCTION], function_call="none").resolve_tools() is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [FUNCTION], "tools": [TOOL]}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "f", "parameters": []}]}, "functions[0].parameters"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
        ({"functions": [FUNCTION], "function_call": {"name": "other"}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_invalid_functions_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatRequest(messages=HI, **fields).resolve_tools()
    assert caught.value.param == param
    assert "tool_" not in caught.value.message or "tools" in fields


def test_function_calls_and_results_in_messages_are_translated() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "7"},
    ]
    call, result = ChatRequest(messages=messages).conversation()
    assert call["tool_calls"] == [{"id": "f", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert "function_call" not in call
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "f", "7")


# errors name the field that the client sent -------------------------------------------------------

BROKEN = {"type": "object", "properties": {"city": {"type": "text"}}}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be from 0 to 20"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens is 0; it must be at least 1"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
    (GENERATE, {"text": "x", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens is -1; it must be at least 1"),
    (GENERATE, {"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num is 21; it must be from 0 to 20"),
    (CHAT, {"custom_params": {"a": 1}}, "custom_params holds 'a', which no logits processor of this server reads"),
    (CHAT, {"custom_params": 1}, "custom_params"),
    (
        GENERATE, {"text": "x", "sampling_params": {"custom_params": {"a": 1}}},
        "sampling_params.custom_params holds 'a', which no logits processor of this server reads",
    ),
    (CHAT, {"tools": [FUNCTION]}, "tools[0].function is missing; send the tool as"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'; only tools of type function are supported"),
    (
        CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": BROKEN, "strict": True}}]},
        "tools[0].function.parameters.properties.city.type is 'text'; it must be one of object, array,",
    ),
    (
        MESSAGES, {"max_tokens": 1, "tools": [{"name": "f", "input_schema": BROKEN, "strict": True}]},
        "tools[0].input_schema.properties.city.type is 'text'; it must be one of object, array,",
    ),
    (
        MESSAGES, {"max_tokens": 1, "tools": [{"type": "computer_20250124", "name": "computer"}]},
        "tools[0].type is 'computer_20250124', which is not supported",
    ),
    (MESSAGES, {"max_tokens": 1, "stop_sequences": [""]}, "stop_sequences holds an empty string"),
]  # fmt: skip


async def test_errors_name_the_field_that_the_client_sent() -> None:
    async with serving() as server:
        for path, fields, sentence in WRONG:
            base: dict[str, Any] = {"model": "frame-tiny", "messages": HI} if path in (CHAT, MESSAGES) else {}
            reply = await server.post(path, {**base, **fields})
            error = reply.json()["error"]
            assert (reply.status, error["message"][: len(sentence)]) == (400, sentence)
            if path != MESSAGES:
                assert error["param"] == sentence.partition(" ")[0].rstrip(":").replace("[...]", "") or "[...]" in sentence


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ([], "p"), ({"type": "str"}, "p.type"), ({"type": ["string", "str"]}, "p.type"), ({"properties": []}, "p.properties"),
        ({"required": "a"}, "p.required"), ({"anyOf": [{"enum": 1}]}, "p.anyOf[0].enum"), ({"items": {"$ref": 1}}, "p.items.$ref"),
        ({"$defs": {"a": {"not": 5}}}, "p.$defs.a.not"),
    ],
)  # fmt: skip
def test_invalid_schemas_are_named(schema: Any, place: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_schemas([(schema, "p")])
    assert caught.value.param == place


def test_valid_schemas_pass() -> None:
    more = {"additionalProperties": False, "items": [{}], "type": ["object", "null"], "$defs": {"a": True}}
    check_schemas([({**SCHEMA, **more}, "p"), (None, "q")])


def test_the_number_of_checked_subschemas_is_bounded() -> None:
    wide = {"properties": {str(i): {} for i in range(MAX_SUBSCHEMAS)}}
    check_schemas([({"type": "text"}, "not checked"), (wide, "p")])
