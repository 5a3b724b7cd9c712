"""The requests that agent frameworks send for tools and typed answers, written from their formats,
against a server of the base installation: each must be answered with calls of the functions'
schemas, one where one was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import httpx
import jsonschema
import pytest

from tests.clients.conftest import KEY, MODEL
from tests.entrypoints import base_only

CITIES = ["Oslo", "Rome"]
SCHEMA = {
    "properties": {
        "city": {"enum": CITIES, "title": "City", "type": "string"},
        "days": {"enum": [1, 2], "title": "Days", "type": "integer"},
    },
    "required": ["city", "days"],
    "title": "Weather",
    "type": "object",
}
STRICT = {**SCHEMA, "additionalProperties": False}
USER = {"role": "user", "content": "How is the weather in Rome?"}


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "The weather.", "parameters": parameters, **more}}


CHAT = {
    "instructor, mode TOOLS": {
        "messages": [USER],
        "tools": [function("Weather", SCHEMA)],
        "tool_choice": {"type": "function", "function": {"name": "Weather"}},
    },
    "instructor, mode TOOLS_STRICT": {
        "messages": [USER],
        "tools": [function("Weather", STRICT, strict=True)],
        "tool_choice": {"type": "function", "function": {"name": "Weather"}},
    },
    "smolagents, ToolCallingAgent": {
        "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": [{"type": "text", "text": "Weather?"}]}],
        "stop": ["Observation:", "Calling tools:"],
        "tools": [function("weather", {"type": "object", "properties": STRICT["properties"], "required": ["city", "days"]})],
        "tool_choice": "required",
    },
    "pydantic-ai, output tool": {
        "messages": [USER],
        "stream": False,
        "tool_choice": "required",
        "tools": [function("final_result", STRICT, strict=True)],
    },
    "Vercel AI SDK, toolChoice": {
        "messages": [USER],
        "tools": [function("weather", {**STRICT, "$schema": "http://json-schema.org/draft-07/schema#"})],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    "OpenAI Agents SDK, tool_choice required": {
        "messages": [{"role": "system", "content": "You help."}, USER],
        "tools": [function("weather", STRICT, strict=True)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}


@pytest.fixture(scope="module")
def http(url: str) -> Any:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}", "x-api-key": KEY}, timeout=60) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT)
def test_chat(http: httpx.Client, name: str) -> None:
    body = {"model": MODEL, "max_tokens": 200, "seed": 3, **CHAT[name]}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    calls = choice["message"]["tool_calls"]
    if body["tool_choice"] != "required" or body.get("parallel_tool_calls") is False:
        assert choice["finish_reason"] == "tool_calls"
        assert len(calls) == 1
    assert not choice["message"]["content"]
    jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), SCHEMA)


def test_strict_function_that_may_be_called(http: httpx.Client) -> None:
    """The OpenAI Agents SDK and pydantic-ai send strict functions without a choice."""
    body = {"model": MODEL, "messages": [USER], "max_tokens": 24, "temperature": 0, "tools": [function("weather", STRICT, strict=True)]}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_responses(http: httpx.Client, choice: Any) -> None:
    """The OpenAI Agents SDK by default."""
    tool = {"type": "function", "name": "weather", "description": "The weather.", "parameters": STRICT, "strict": True}
    body = {"model": MODEL, "input": [USER], "max_output_tokens": 200, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    reply = http.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    (call,) = [item for item in reply.json()["output"] if item["type"] == "function_call"]
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}])
def test_anthropic(http: httpx.Client, choice: Any) -> None:
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    body = {"model": MODEL, "max_tokens": 200, "messages": [USER], "tools": [tool], "tool_choice": choice}
    reply = http.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    (block,) = reply.json()["content"]
    assert reply.json()["stop_reason"] == "tool_use"
    jsonschema.validate(block["input"], SCHEMA)


def test_named_function_is_called_once(http: httpx.Client) -> None:
    """Whatever `parallel_tool_calls` says: who names a function wants that call and no further
    one."""
    for parallel in ({}, {"parallel_tool_calls": True}, {"parallel_tool_calls": False}):
        body = {"model": MODEL, "max_tokens": 200, "n": 4, "seed": 1, **CHAT["instructor, mode TOOLS"], **parallel}
        reply = http.post("/v1/chat/completions", json=body).json()
        assert [choice["finish_reason"] for choice in reply["choices"]] == ["tool_calls"] * 4
        assert [len(choice["message"]["tool_calls"]) for choice in reply["choices"]] == [1] * 4


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 8, 11, 14, 40, 47, 53])
def test_cut_calls_leave_no_markup_in_the_content(http: httpx.Client, max_tokens: int) -> None:
    """Whole, streamed and as Anthropic's blocks; the larger numbers end in a second call."""
    body = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, **CHAT["pydantic-ai, output tool"]}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert not choice["message"]["content"]
    lines = http.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ""
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    body = {"model": MODEL, "max_tokens": max_tokens, "messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}}
    blocks = http.post("/v1/messages", json={**body, "temperature": 0}).json()["content"]
    assert [block for block in blocks if block["type"] == "text" and block["text"]] == []


def test_server_sees_the_base_installation_alone() -> None:
    """Else these tests would show nothing: what the extras bring is hidden from it."""
    program = """
import importlib.metadata, sys
for module in ("openai", "grpc", "pytest", "opentelemetry.sdk"):
    try:
        __import__(module)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{module} imports")
names = {found.metadata["Name"].lower() for found in importlib.metadata.distributions()}
assert "openai" not in names and "torch" in names, names
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **base_only.environment()}, check=True, timeout=500)
