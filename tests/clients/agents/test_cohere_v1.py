"""Cohere's `/v1/chat`: turns, tools, streams and errors, over HTTP and by LiteLLM, which speaks
it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.entrypoints.http.dialects.cohere_chat_v1 import CohereV1Request
from tests.clients.agents.conftest import serve
from tests.clients.agents.test_dialects import CALL, MODEL, REPLIES
from tests.entrypoints.serving import RunningServer

TOOL = {"name": "look", "description": "Look", "parameter_definitions": {"at": {"type": "str", "description": "What", "required": True}}}
MADE = {"name": "look", "parameters": {"at": "x"}}
RESULT = {"call": MADE, "outputs": [{"seen": "tree"}]}


@pytest.fixture(scope="module")
def server(agent_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(agent_checkpoint, tmp_path_factory.mktemp("cohere"), REPLIES, "--max-model-len", "2048") as running:
        yield running


def say(text: str) -> str:
    return f"[[say]]{text}[[end]]"


def post(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + "/v1/chat", json={"model": MODEL, **body}, timeout=60)


def ask(server: RunningServer, text: str, **more: Any) -> dict[str, Any]:
    reply = post(server, {"message": say(text), **more})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def prompt_of(server: RunningServer, body: dict[str, Any]) -> str:
    """What the chat template makes of the messages, in the way of `/v1/chat/completions`."""
    ids = httpx.post(server.url + "/tokenize", json={"model": MODEL, **body}, timeout=60).json()["tokens"]
    text: str = httpx.post(server.url + "/detokenize", json={"tokens": ids, "skip_special_tokens": False}, timeout=60).json()["text"]
    return text


@pytest.mark.slow
def test_chats(server: RunningServer) -> None:
    reply = ask(server, "one END two", stop_sequences=["END"], k=5, p=0.9, seed=1, temperature=0.5)
    assert (reply["text"], reply["finish_reason"], reply["generation_id"] != "") == ("one ", "STOP_SEQUENCE", True)
    assert reply["chat_history"] == [{"role": "USER", "message": say("one END two")}, {"role": "CHATBOT", "message": "one "}]
    assert reply["meta"]["tokens"]["output_tokens"] > 1 and reply["meta"]["api_version"] == {"version": "1"}
    assert ask(server, "one two three", max_tokens=1)["finish_reason"] == "MAX_TOKENS"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    assert ask(server, "no", response_format={"type": "json_object", "schema": schema})["text"] == '{"a":1}'


def test_the_conversation_is_that_of_other_routes(server: RunningServer) -> None:
    history = [{"role": "USER", "message": "a"}, {"role": "Chatbot", "message": "b"}, {"role": "SYSTEM", "message": "c"}]
    counted = ask(server, "d", preamble="be brief", chat_history=history)["meta"]["tokens"]["input_tokens"]
    turns = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("system", "c"), ("user", say("d"))]
    messages = [{"role": role, "content": text} for role, text in turns]
    chat = httpx.post(server.url + "/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=60).json()
    assert counted == chat["usage"]["prompt_tokens"]
    documents = [{"title": "t", "text": "x"}]
    body = {"message": say("d"), "documents": documents}
    second = {"messages": [{"role": "user", "content": say("d")}], "documents": [{"data": documents[0]}]}
    other = httpx.post(server.url + "/v2/chat", json={"model": MODEL, **second}, timeout=60).json()
    assert post(server, body).json()["meta"]["tokens"]["input_tokens"] == other["usage"]["tokens"]["input_tokens"]


def test_tools(server: RunningServer) -> None:
    """A call, and its result in both ways: in one step, and with the history of the response."""
    reply = ask(server, CALL, tools=[TOOL])
    assert (reply["tool_calls"], reply["finish_reason"], reply["text"]) == ([MADE], "COMPLETE", "")
    history = [{"role": "USER", "message": "look"}, reply["chat_history"][-1]]
    done = post(server, {"message": "", "chat_history": history, "tools": [TOOL], "tool_results": [RESULT]}).json()
    assert done["text"] == "done", done
    assert [each["role"] for each in done["chat_history"]] == ["USER", "CHATBOT", "TOOL", "CHATBOT"]
    both = post(server, {"message": say("more"), "chat_history": history, "tools": [TOOL], "tool_results": [RESULT]}).json()
    assert [each["role"] for each in both["chat_history"]] == ["USER", "CHATBOT", "TOOL", "USER", "CHATBOT"]
    single = post(server, {"message": "look", "tools": [TOOL], "tool_results": [RESULT], "force_single_step": True}).json()
    assert single["text"] == "done"
    for is_single, finds in ((False, [MADE]), (True, None)):  # whether the model may call again, with the results it has
        fields = {"message": say(CALL), "tools": [TOOL], "tool_results": [RESULT], "force_single_step": is_single}
        assert post(server, fields).json().get("tool_calls") == finds
    again = post(server, {"message": say("more"), "chat_history": done["chat_history"], "tools": [TOOL]}).json()
    assert again["text"] == "more"


def test_streams(server: RunningServer) -> None:
    reply = post(server, {"message": say(f"I look. {CALL}"), "tools": [TOOL], "stream": True})
    assert reply.headers["content-type"] == "application/stream+json"
    events = [json.loads(line) for line in reply.text.splitlines()]
    assert [events[0]["event_type"], *(each["event_type"] for each in events[-2:])] == [
        "stream-start", "tool-calls-generation", "stream-end",
    ]  # fmt: skip
    assert "".join(each["text"] for each in events if each["event_type"] == "text-generation").strip() == "I look."
    assert [each["is_finished"] for each in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["response"]["tool_calls"] == events[-2]["tool_calls"] == [MADE]


@pytest.mark.slow
def test_litellm(litellm: Any, server: RunningServer) -> None:
    fields: dict[str, Any] = {"model": f"cohere_chat/v1/{MODEL}", "api_key": "none", "api_base": server.url + "/v1/chat"}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": say("hello there")})
    reply = litellm.completion(messages=messages, **fields)
    assert reply.choices[0].message.content == "hello there" and reply.usage.completion_tokens > 0
    pieces = [each.choices[0].delta.content or "" for each in litellm.completion(messages=messages, stream=True, **fields)]
    assert "".join(pieces) == "hello there"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "message is empty; send a text, or tool_results"),
        ({"message": "x", "connectors": [{"id": "web-search"}]}, "connectors is not supported; search in your program"),
        ({"message": "x", "conversation_id": "c"}, "conversation_id is not supported; send chat_history"),
        ({"message": "x", "search_queries_only": True}, "search_queries_only is not supported"),
        ({"message": "x", "raw_prompting": True}, "raw_prompting is not supported; use /v1/completions"),
        ({"message": "x", "return_prompt": True}, "return_prompt is not supported"),
        ({"message": "x", "max_input_tokens": 5}, "max_input_tokens is not supported; use prompt_truncation"),
        ({"message": "x", "chat_history": [{"role": "robot", "message": "y"}]}, "chat_history[0].role is 'robot'; it must be USER"),
        ({"message": "x", "chat_history": [{"role": "USER", "message": 1}]}, "chat_history[0].message: expected a string"),
        ({"message": "x", "tools": [{"name": "f", "parameter_definitions": {"a": 1}}]}, "tools[0].parameter_definitions.a: expected"),
        ({"message": "x", "tool_results": [{"outputs": []}]}, "tool_results[0].call: expected an object"),
        (
            {"chat_history": [{"role": "CHATBOT", "tool_calls": [MADE]}], "tool_results": [{"call": {"name": "g"}, "outputs": []}]},
            "tool_results[0].call is not one of the calls before it",
        ),
        ({"message": "x", "prompt_truncation": "MAYBE"}, "prompt_truncation"),
        ({"message": "x", "k": "y"}, "k is a string"),
        ({"message": "x", "p": 2.0}, "p is 2.0"),
        ({"message": "x " * 4000}, "maximum context length"),
    ],
)
def test_chats_that_are_wrong(server: RunningServer, fields: dict[str, Any], says: str) -> None:
    reply = post(server, fields)
    assert (reply.status_code, set(reply.json())) == (400, {"id", "message"}), reply.text
    assert says in reply.json()["message"]


def test_a_long_history_is_cut_where_that_is_asked(server: RunningServer) -> None:
    history = [{"role": role, "message": "word " * 100} for role in ("USER", "CHATBOT") * 12]
    refused = post(server, {"message": say("hi"), "chat_history": history})
    assert refused.status_code == 400 and "maximum context length" in refused.json()["message"]
    assert ask(server, "hi", chat_history=history, prompt_truncation="AUTO")["text"] == "hi"


def test_results_of_many_calls_find_theirs_in_one_look() -> None:
    """A body holds thousands of calls and results, and its messages are made on the event loop."""
    looks = 0

    class Counted(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            nonlocal looks
            looks += 1
            return super().get(name, default)

    count = 300
    calls = [Counted(name="look", parameters={"at": [number % 200, {"x": 1}]}) for number in range(count)]
    history = [{"role": "CHATBOT", "tool_calls": calls}]
    results = [{"call": call, "outputs": [{"seen": index}]} for index, call in reversed(list(enumerate(calls)))]
    messages = CohereV1Request(message="", chat_history=history, tool_results=results).list_messages()
    answers = {each["tool_call_id"]: each["content"][0]["text"] for each in messages if each["role"] == "tool"}
    assert len(answers) == count
    assert {answers["call_1"], answers["call_201"]} == {'{"seen":0}', '{"seen":200}'}
    assert answers["call_150"] == '{"seen":149}'
    assert looks < 20 * count
