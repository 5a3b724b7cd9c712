"""The `openai` package, unmodified, against `/v1/responses`."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.clients.conftest import KEY, MODEL, WEATHER_SCHEMA

ASK: dict[str, Any] = {"model": MODEL, "input": "What is 2 + 5?", "temperature": 0, "max_output_tokens": 24}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": WEATHER_SCHEMA,
    "strict": True,
}
THOUGHT_AND_CALL = r'<think>hm</think>ok<tool_call>\{"name": "get_weather", "arguments": \{"city": "(Oslo|Rome)"\}\}</tool_call>'
CALLING: dict[str, Any] = ASK | {"max_output_tokens": 120, "tools": [WEATHER], "extra_body": {"regex": THOUGHT_AND_CALL}}


class Sum(pydantic.BaseModel):
    is_even: bool


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)


def test_response_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    assert (whole.status, whole.output_text) == ("completed", "7")
    assert whole.usage.output_tokens > 0
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


async def test_async(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        whole = await client.responses.create(**ASK)
        kinds = [event.type async for event in await client.responses.create(**ASK, stream=True)]
    assert whole.output_text == "7"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_reasoning_and_calls_and_their_results(client: openai.OpenAI) -> None:
    whole = client.responses.create(**CALLING)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thinking, message, call = whole.output
    assert (thinking.content[0].text, message.content[0].text, call.name) == ("hm", "ok", "get_weather")
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(**CALLING) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output[2].arguments == call.arguments
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept = client.responses.create(**(ASK | {"input": [result], "tools": [WEATHER]}), previous_response_id=whole.id)
    items = [{"role": "user", "content": ASK["input"]}, *whole.output, result]
    sent = client.responses.create(**(ASK | {"input": items, "tools": [WEATHER]}))
    assert kept.usage.input_tokens == sent.usage.input_tokens > whole.usage.input_tokens
    assert kept.output_text == sent.output_text


def test_required_and_named_calls(client: openai.OpenAI) -> None:
    ask = CALLING | {"max_output_tokens": 100, "extra_body": {}}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        found = client.responses.create(**ask, tool_choice=choice, parallel_tool_calls=False)
        (call,) = found.output
        assert (call.type, call.name, list(json.loads(call.arguments))) == ("function_call", "get_weather", ["city"])


def test_structured_output(client: openai.OpenAI) -> None:
    found = client.responses.parse(**ASK, text_format=Sum)
    assert isinstance(found.output_parsed, Sum)


def test_kept_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**ASK, previous_response_id=first.id, instructions="Be brief.")
    count = client.responses.input_tokens.count(model=MODEL, input=ASK["input"], previous_response_id=first.id, instructions="Be brief.")
    assert count.input_tokens == second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    for use in (client.responses.retrieve, client.responses.delete, lambda name: client.responses.create(**ASK, previous_response_id=name)):
        with pytest.raises(openai.NotFoundError, match="no response"):
            use(first.id)
    unkept = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_limits_and_cancelling(client: openai.OpenAI) -> None:
    endless = {"ignore_eos": True}
    short = client.responses.create(**(ASK | {"max_output_tokens": 3}), extra_body=endless)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    stream = client.responses.create(**(ASK | {"max_output_tokens": 3000}), extra_body=endless, stream=True)
    name = next(stream).response.id
    assert client.responses.retrieve(name).status == "in_progress"
    assert client.responses.cancel(name).status == "cancelled"
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(name).status == "cancelled"
    with client.responses.create(**(ASK | {"max_output_tokens": 3000}), extra_body=endless, stream=True) as stream:
        name = next(stream).response.id
    assert client.responses.create(**ASK).status == "completed"


def until_over(client: openai.OpenAI, name: str) -> Any:
    for _ in range(600):
        found = client.responses.retrieve(name)
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{name} is not over")


def test_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(**ASK, background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    found = until_over(client, begun.id)
    assert (found.status, found.output_text, found.background) == ("completed", "7", True)
    assert found.usage.output_tokens > 0
    assert client.responses.create(**ASK, previous_response_id=begun.id).status == "completed"
    client.responses.delete(begun.id)
    endless = client.responses.create(**(ASK | {"max_output_tokens": 3000}), extra_body={"ignore_eos": True}, background=True)
    with pytest.raises(openai.BadRequestError, match="cancel it before"):
        client.responses.delete(endless.id)
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert until_over(client, endless.id).status == "cancelled"


FAR = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"max_output_tokens": 0}, "max_tokens is 0"),
        ({"input": []}, "messages is empty"),
        ({"background": True, "stream": True}, "leave stream out"),
        ({"background": True, "store": False}, "has to be kept; leave store out"),
        ({"background": True, "temperature": -1}, "temperature is -1"),
        ({"tools": [{"type": "web_search"}]}, "runs no tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]}, "text only"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "arguments: expected a string"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: expected an object"),
        ({"text": {"format": FAR}}, r"the \$ref 'http://x/y'.*'param': 'text.format'"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_bad_requests(client: openai.OpenAI, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(**(ASK | change))


def test_keys_see_their_own(url: str) -> None:
    found = httpx.post(url + "/v1/responses", json=ASK, trust_env=False)
    assert found.status_code == 401
