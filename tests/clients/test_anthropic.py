"""The `anthropic` package, unmodified, against `/v1/messages`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import KEY, MODEL, WEATHER_SCHEMA

if TYPE_CHECKING:
    import anthropic

GREEDY = {"temperature": 0}
MESSAGES: list[Any] = [{"role": "user", "content": "What is 2 + 5?"}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": MESSAGES, "extra_body": GREEDY}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": WEATHER_SCHEMA,
}
THOUGHT_AND_CALL = r'<think>hm</think>ok<tool_call>\{"name": "get_weather", "arguments": \{"city": "(Oslo|Rome)"\}\}</tool_call>'


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def test_message_and_its_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    assert whole.type == "message"
    assert whole.role == "assistant"
    assert whole.stop_reason == "end_turn"
    assert whole.content[0].type == "text"
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text == "7"
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]  # the client drops pings
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_async(url: str) -> None:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    assert text == whole.content[0].text


def test_limits_and_stop_sequences(client: anthropic.Anthropic) -> None:
    ask = ASK | {"messages": [{"role": "user", "content": "Say something long."}]}
    short = client.messages.create(**(ask | {"max_tokens": 3, "extra_body": {"ignore_eos": True}}))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = client.messages.create(**(ask | {"extra_body": {"regex": "abcEND"}}), stop_sequences=["END"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "abc")


def test_thinking_and_tool_use(client: anthropic.Anthropic) -> None:
    ask = ASK | {"max_tokens": 120, "tools": [WEATHER], "extra_body": GREEDY | {"regex": THOUGHT_AND_CALL}}
    whole = client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = whole.content
    assert (thinking.thinking, text.text, call.name, whole.stop_reason) == ("hm", "ok", "get_weather", "tool_use")
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    reply = client.messages.create(**(ASK | {"messages": turns}), tools=[WEATHER])
    assert reply.usage.input_tokens > 0


def test_required_and_named_calls(client: anthropic.Anthropic) -> None:
    time_of_day = {"name": "get_time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    ask = ASK | {"max_tokens": 100, "tools": [WEATHER, time_of_day]}
    for named in ({"type": "any"}, {"type": "tool", "name": "get_time"}):
        choice: dict[str, Any] = named | {"disable_parallel_tool_use": True}
        with client.messages.stream(**ask, tool_choice=choice) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(**ask, tool_choice=choice)
        (call,) = whole.content
        assert (call.type, whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use", "tool_use")
        assert (streamed.content[0].name, streamed.content[0].input) == (call.name, call.input)
        assert call.name == choice.get("name", call.name)


def test_begun_answers_go_on(client: anthropic.Anthropic) -> None:
    begun = {"role": "assistant", "content": "The sum of 2 and 5 is"}
    usual, prefilled = client.messages.create(**ASK), client.messages.create(**(ASK | {"messages": [*MESSAGES, begun]}))
    assert prefilled.usage.input_tokens + prefilled.usage.cache_read_input_tokens > usual.usage.input_tokens
    assert not prefilled.content[0].text.startswith("The sum")


def test_structured_output(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"sum": {"enum": [7, 8]}}, "required": ["sum"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    found = client.messages.create(**ASK, output_config={"format": form})
    assert json.loads(found.content[0].text)["sum"] in (7, 8)


def test_system_and_cache(client: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "You are a patient teacher. " * 40, "cache_control": {"type": "ephemeral"}}]
    client.messages.create(**ASK, system=system)
    second = client.messages.create(**ASK, system=system)
    assert second.usage.cache_read_input_tokens > 100
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system=system)
    assert count.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"temperature": -1}}, "temperature is -1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]}, "text only"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, "web_search_20250305"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "on"}}, "thinking.type is 'on'; it must be enabled, adaptive or disabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens is -1; it must be a whole number"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens is True"),
        ({"extra_body": {"output_config": {"effort": 5}}}, "output_config.effort: expected a string"),
    ],
)
def test_bad_requests(client: anthropic.Anthropic, change: dict[str, Any], says: str) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match=says) as caught:
        client.messages.create(**(ASK | change))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors_have_their_dialect(url: str, client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**(ASK | {"model": "another"}))
    with pytest.raises(anthropic.AuthenticationError, match="key") as caught:
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**ASK)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_ids_and_models_have_their_own_shape(client: anthropic.Anthropic) -> None:
    asked = ASK | {"max_tokens": 100, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}
    whole = client.messages.create(**asked)
    assert whole._request_id
    assert whole.id.startswith("msg_")
    assert [block.id.partition("_")[0] for block in whole.content if block.type == "tool_use"] == ["toolu"]
    listed = client.models.list()
    assert [(model.type, model.id) for model in listed] == [("model", MODEL)]
    assert client.models.retrieve(MODEL).display_name == MODEL
