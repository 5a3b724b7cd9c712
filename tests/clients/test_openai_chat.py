"""The `openai` package, unmodified, against chat and completions of the embedded model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic

from tests.clients.conftest import CALL, KEY, MODEL, WEATHER_SCHEMA

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 + 5?"}], "temperature": 0, "max_tokens": 24}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER_SCHEMA},
}


class Verdict(pydantic.BaseModel):
    is_even: bool


def test_sync_and_stream(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == MODEL
    whole = client.chat.completions.create(**ASK)
    with client.chat.completions.stream(**ASK) as stream:
        final = stream.get_final_completion()
    assert whole.choices[0].message.content == final.choices[0].message.content == "7"


async def test_async(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        replies = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(8)))
        pieces = [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(**ASK, stream=True)]
    assert {reply.choices[0].message.content for reply in replies} == {"7"} == {"".join(pieces)}


def test_tools(client: openai.OpenAI) -> None:
    ask = ASK | {"max_tokens": 100, "tools": [WEATHER], "extra_body": {"regex": CALL}}
    whole = client.chat.completions.create(**ask).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    with client.chat.completions.stream(**ask) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    turns = [*ASK["messages"], whole.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(**(ASK | {"messages": turns}), tools=[WEATHER]).choices[0].message.content


def test_structured_output(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(**ASK, response_format=Verdict)
    assert isinstance(found.choices[0].message.parsed, Verdict)


def test_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt=["def add(a, b):", "import os"], max_tokens=8, logprobs=2)
    assert len(found.choices) == 2
    assert len(found.choices[0].logprobs.tokens) == 8
