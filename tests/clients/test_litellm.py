"""LiteLLM, unmodified, as an OpenAI-compatible and as an Anthropic-compatible server's client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL, WEATHER_SCHEMA

MESSAGES = [{"role": "user", "content": "What is 2 + 5?"}]


@pytest.fixture(params=["openai", "anthropic"])
def ask(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    base = url + "/v1" if request.param == "openai" else url
    return {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": KEY, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


def test_completion_and_stream(litellm: Any, ask: dict[str, Any]) -> None:
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == "7"
    assert whole.usage.completion_tokens > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)) == "7"


async def test_async(litellm: Any, ask: dict[str, Any]) -> None:
    assert (await litellm.acompletion(**ask)).choices[0].message.content == "7"
    stream = await litellm.acompletion(**ask, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "7"


def test_errors_keep_their_sentence(litellm: Any, ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature is -1"):
        litellm.completion(**(ask | {"temperature": -1}))


@pytest.mark.parametrize("more", [{"max_tokens": 100_000}, {"messages": [{"role": "user", "content": "seven " * 10_000}]}])
def test_a_context_that_is_exceeded_is_recognised(litellm: Any, ask: dict[str, Any], more: dict[str, Any]) -> None:
    with pytest.raises(litellm.exceptions.ContextWindowExceededError, match="maximum context length is"):
        litellm.completion(**(ask | more))


TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER_SCHEMA}}


def test_tools_and_their_results(litellm: Any, ask: dict[str, Any]) -> None:
    pytest.importorskip("mcp")  # LiteLLM's extra of that name: it imports it with any tools, whosever they are
    asked = ask | {"messages": [{"role": "user", "content": "How is the weather?"}], "max_tokens": 100, "tools": [TOOL]}
    forced = asked | {"tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**forced).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**forced, stream=True)]
    pieces = [each for delta in deltas for each in delta.tool_calls or []]
    assert pieces[0].function.name == "get_weather"
    arguments = "".join(each.function.arguments or "" for each in pieces)
    assert json.loads(arguments) == json.loads(call.function.arguments)  # Anthropic's dialect sends an object, written anew
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turn = [*asked["messages"], whole.message.model_dump(), result]
    assert litellm.completion(**(asked | {"messages": turn, "max_tokens": 16})).choices[0].finish_reason in ("stop", "length")
