"""Ollama's API as LiteLLM uses it, unmodified, and in the shapes that Ollama documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from frame.entrypoints.http.chat.output_parser import ContentBlock
from frame.entrypoints.http.dialects.ollama import ResponseLines, _message
from tests.clients.conftest import KEY, MODEL, WEATHER_SCHEMA

MESSAGES = [{"role": "user", "content": "What is 2 + 5?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER_SCHEMA}}

WRONG_CALL = {"function": {"name": "f", "arguments": 5}}


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60) as found:
        yield found


def lines_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_litellms_chat(litellm: Any, url: str) -> None:
    ask = {"model": f"ollama_chat/{MODEL}", "api_base": url, "api_key": KEY, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == "7"
    assert whole.usage.completion_tokens > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)) == "7"


def test_litellms_completion(litellm: Any, url: str) -> None:
    ask = {"model": f"ollama/{MODEL}", "api_base": url, "api_key": KEY, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    assert litellm.completion(**ask).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)]
    assert "".join(pieces) == litellm.completion(**ask).choices[0].message.content


def test_chat_streams_lines_by_default(client: httpx.Client) -> None:
    body = {"model": MODEL + ":latest", "messages": MESSAGES, "options": {"temperature": 0, "num_predict": 24, "num_ctx": 2048}}
    *pieces, last = lines_of(client.post("/api/chat", json=body))
    assert "".join(piece["message"]["content"] for piece in pieces) == "7"
    assert all(piece["done"] is False and piece["model"] == MODEL + ":latest" for piece in pieces)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["prompt_eval_count"] > 0
    assert last["eval_count"] > 0
    assert last["total_duration"] >= last["eval_duration"] > 0
    whole = client.post("/api/chat", json=body | {"stream": False}).json()
    assert (whole["message"], whole["done"]) == ({"role": "assistant", "content": "7"}, True)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_thinking_and_calls_and_their_results(client: httpx.Client, is_streamed: bool) -> None:
    grammar = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}
    reply = client.post("/api/chat", json={"model": MODEL, "messages": MESSAGES, "format": grammar, "stream": False})
    assert json.loads(reply.json()["message"]["content"]) == {"city": "Oslo"}
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    turn = [{"role": "user"}, *MESSAGES, {"role": "assistant", "thinking": "hm", "tool_calls": [call]}]
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    body = {"model": MODEL, "messages": [*turn, result], "tools": [TOOL], "stream": is_streamed, "options": {"num_predict": 8}}
    reply = client.post("/api/chat", json=body)
    last = lines_of(reply)[-1] if is_streamed else reply.json()
    assert last["done_reason"] in ("stop", "length")
    assert last["prompt_eval_count"] > 60


def test_a_call_is_one_object() -> None:
    lines = ResponseLines(SimpleNamespace(sequences=[None]), None, MODEL, _message)
    block = ContentBlock(0, "call", "get_weather", "call_1", ['{"city": ', '"Oslo"}'])
    assert (lines.write_start(block), lines.write_delta(block, "x")) == (b"", b"")
    found = json.loads(lines.write_stop(block))
    assert found["message"]["tool_calls"] == [{"id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]


def test_generate(client: httpx.Client) -> None:
    options = {"temperature": 0, "num_predict": 24}
    chat = client.post("/api/chat", json={"model": MODEL, "messages": MESSAGES, "options": options, "stream": False}).json()
    body = {"model": MODEL, "prompt": MESSAGES[0]["content"], "options": options}
    whole = client.post("/api/generate", json=body | {"stream": False}).json()
    assert (whole["response"], whole["prompt_eval_count"]) == (chat["message"]["content"], chat["prompt_eval_count"])
    assert "".join(line["response"] for line in lines_of(client.post("/api/generate", json=body))) == whole["response"]
    raw = client.post("/api/generate", json=body | {"raw": True, "stream": False}).json()
    assert raw["prompt_eval_count"] < whole["prompt_eval_count"]
    loaded = client.post("/api/generate", json={"model": MODEL}).json()
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")


def test_what_clients_ask_first(client: httpx.Client) -> None:
    (card,) = client.get("/api/tags").json()["models"]
    assert card["name"] == card["model"] == MODEL
    assert set(card["details"]) >= {"format", "family", "families", "parameter_size", "quantization_level"}
    shown = client.post("/api/show", json={"model": MODEL}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"][shown["model_info"]["general.architecture"] + ".context_length"] > 0
    assert client.get("/api/version").json()["version"]
    assert client.get("/api/ps").json()["models"]


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict is 0"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature is a string; send a number"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("/api/chat", {"options": {"mirostat": False}}, "options.mirostat is not supported"),
        ("/api/chat", {"options": {"mirostat_tau": "x"}}, "options.mirostat_tau is not supported"),
        ("/api/chat", {"options": {"typical_p": True}}, "options.typical_p is not supported"),
        ("/api/chat", {"options": {"top_k": False}}, "options.top_k is false; send a whole number"),
        ("/api/chat", {"options": {"num_ctx": "many"}}, "options.num_ctx is a string; send a number"),
        ("/api/chat", {"options": {"num_keep": True}}, "options.num_keep is true; send a number"),
        ("/api/chat", {"options": {"use_mmap": 1}}, "options.use_mmap is a whole number; send true or false"),
        ("/api/chat", {"options": {"wrong": 2}}, "options.wrong is unknown"),
        ("/api/chat", {"options": {"num_predct": 2}}, "options.num_predct is unknown; did you mean 'num_predict'?"),
        ("/api/generate", {"model": "other", "prompt": ""}, "the model 'other' does not exist"),
        ("/api/chat", {"format": "yaml"}, "format is 'yaml'"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["x"]}]},
            "messages[0].images[0]: this model takes text only",
        ),
        ("/api/chat", {"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls: expected a list"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x", "tool_name": {"a": 1}}]}, "messages[0].tool_name: expected a string"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x", "tool_call_id": [1]}]}, "messages[0].tool_call_id: expected a string"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [WRONG_CALL]}]}, "function.arguments: expected an object"),
        ("/api/chat", {"model": "other"}, "the model 'other' does not exist"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix needs a model with fill-in-the-middle tokens"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context is not supported"),
    ],
)
def test_errors_have_ollamas_shape(client: httpx.Client, path: str, change: dict[str, Any], says: str) -> None:
    given = {"messages": MESSAGES} if path == "/api/chat" else {}
    reply = client.post(path, json={"model": MODEL} | given | change)
    assert reply.status_code in (400, 404)
    assert set(reply.json()) == {"error"}
    assert says in reply.json()["error"]
