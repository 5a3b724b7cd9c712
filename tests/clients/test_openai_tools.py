"""Chat by the `openai` package as it comes, sync and async: tools, structured output, several
choices, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import KEY, MODEL
from tests.entrypoints.serving import RunningServer

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Rome?"}]


class Weather(BaseModel):
    """What is asked for, as a tool and as an answer."""

    city: Literal["Rome", "Bonn"]
    days: Literal[1, 2]
    exact: bool


def tool(name: str, schema: dict[str, Any], **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [tool("get_weather", CITY), tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]


@pytest.fixture(scope="module")
def client(clients_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=clients_server.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 128, "seed": 1, **fields})


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def joined(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """-> (content, [[id, name, arguments]], finish reason) of a stream."""
    content, calls, reason = "", [], ""
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    return content, calls, reason


def test_a_required_call_is_a_valid_call(client: openai.OpenAI) -> None:
    for reply in ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4).choices:
        assert reply.finish_reason == "tool_calls"
        assert reply.message.content is None
        (call,) = calls_of(reply.message)
        assert call in [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Bonn"}), ("now", {})]


def test_a_named_function_is_called_by_every_choice(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    reply = ask(client, tools=TOOLS, tool_choice=named, parallel_tool_calls=False, n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {name for choice in reply.choices for name, _ in calls_of(choice.message)} == {"get_weather"}
    assert len({choice.message.tool_calls[0].id for choice in reply.choices}) == 3


def test_calls_stream_as_they_come(client: openai.OpenAI) -> None:
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "parallel_tool_calls": False}
    whole = ask(client, **fields).choices[0]
    chunks = list(ask(client, **fields, stream=True))
    content, calls, reason = joined(chunks)
    assert (content, reason) == ("", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == calls_of(whole.message)
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 1


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_no_calls_unless_required(client: openai.OpenAI, choice: str | None) -> None:
    reply = ask(client, tools=TOOLS, **({} if choice is None else {"tool_choice": choice}), temperature=0).choices[0]
    assert reply.message.content
    assert not reply.message.tool_calls


def test_the_package_reads_tools_and_answers_as_models(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "seed": 1}
    tools = [openai.pydantic_function_tool(Weather)]
    reply = client.chat.completions.parse(**fields, tools=tools, tool_choice="required", parallel_tool_calls=False)
    calls = reply.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, Weather)
    assert isinstance(client.chat.completions.parse(**fields, response_format=Weather).choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**fields, tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final
    assert isinstance(final[0].function.parsed_arguments, Weather)


async def test_async(clients_server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=clients_server.url + "/v1", api_key=KEY, max_retries=0) as client:
        fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 128, "seed": 1}
        stream = await client.chat.completions.create(**fields, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True)
        _, calls, reason = joined([chunk async for chunk in stream])
        assert reason == "tool_calls"
        assert len(calls) == 1
        parsed = await client.chat.completions.parse(**fields, response_format=Weather)
        assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    first = ask(client, tools=TOOLS, tool_choice=named, parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    second = ask(client, messages=[*MESSAGES, first, result], tools=TOOLS, temperature=0, max_tokens=16)
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > 20


def test_logprobs_of_constrained_output(client: openai.OpenAI) -> None:
    reply = ask(client, extra_body={"guided_choice": ["yes", "no"]}, logprobs=True, top_logprobs=3, n=2)
    for choice in reply.choices:
        assert choice.message.content in ("yes", "no")
        tokens = choice.logprobs.content
        assert bytes(byte for token in tokens for byte in token.bytes).decode().startswith(choice.message.content)
        assert all(len(token.top_logprobs) == 3 for token in tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[ab]{3}"},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"guided_grammar": "root ::= [ab] [ab] [ab]"},
        {"regex": "[ab]{3}"},
        {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "[ab]{3}"}}},
    ],
)
def test_the_other_names_of_grammars(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    text = ask(client, extra_body=fields).choices[0].message.content
    assert len(text) == 3
    assert set(text) <= {"a", "b"}


def test_an_answer_is_continued(client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The weather is"}]
    body = {"continue_final_message": True}
    assert ask(client, messages=messages, temperature=0, extra_body=body).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="needs a last message of the assistant"):
        ask(client, extra_body=body)


def test_fields_that_change_nothing_here(client: openai.OpenAI) -> None:
    reply = ask(client, service_tier="flex", reasoning_effort="low", store=False, metadata={"a": "b"}, user="u", max_completion_tokens=2)
    assert reply.service_tier == "default"
    assert reply.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "it must be auto, none, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "not among tools"),
        ({"tools": [tool("a b", {})]}, "expected 1 to 128 letters"),
        ({"tools": [tool("f", {}), tool("f", {})]}, "two functions of the same name"),
        ({"tools": [tool(f"f{i}", {}) for i in range(129)]}, "it may have 128"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "only tools of type function"),
        ({"tools": [tool("f", {"type": "object", "properties": [1]})]}, "properties: expected an object"),
        ({"tools": [tool("f", {"type": "nothing"})], "tool_choice": "required"}, r"tools\[0\].function.parameters.type is 'nothing'"),
        ({"service_tier": "gold"}, "service_tier is .gold.; it must be .auto."),
        ({"modalities": ["text", "audio"]}, "answers in text"),
        ({"extra_body": {"structured_outputs": {"a": 1}}}, "structured_outputs.a is not a known field"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "json": {}}}}, "exactly one of"),
        ({"extra_body": {"guided_choice": []}}, "list of strings"),
        ({"extra_body": {"guided_json": "{", "tools": TOOLS, "tool_choice": "auto"}}, "guided_json is not a JSON object"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(client, **fields)


def test_functions_get_the_old_shape(client: openai.OpenAI) -> None:
    asked = {"functions": [TOOLS[0]["function"]], "function_call": {"name": "get_weather"}}
    (choice,) = ask(client, **asked).choices
    assert choice.finish_reason in ("function_call", "stop")
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments)["city"] in ("Rome", "Bonn")
    chunks = [chunk.choices[0] for chunk in ask(client, **asked, stream=True)]
    calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert calls[0].name == "get_weather"
    assert json.loads("".join(call.arguments or "" for call in calls)) == json.loads(choice.message.function_call.arguments)
    assert chunks[-1].finish_reason == choice.finish_reason
