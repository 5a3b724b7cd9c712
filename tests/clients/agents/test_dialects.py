"""One meaning of the fields for reasoning in every chat API, and Cohere's chats, through the socket
of a server whose model says what its prompt asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.clients.agents.conftest import serve
from tests.entrypoints.serving import RunningServer

MODEL = "agent-model"
# Its template writes the switch, as the two names that templates use.
REPLIES = [{"has": "[TrueTrue]", "says": "<think>hm</think>on"}, {"has": "[FalseFalse]", "says": "off"}]
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


class Dialect(NamedTuple):
    """A chat route, and a body without the fields under test."""

    path: str
    body: dict[str, Any]

    def read(self, reply: dict[str, Any]) -> tuple[str, str]:
        """(content, reasoning) of a response."""
        return READERS[self.path](reply)


def read_chat(reply: dict[str, Any]) -> tuple[str, str]:
    message = reply["choices"][0]["message"]
    return message["content"], message.get("reasoning_content", "")


def read_responses(reply: dict[str, Any]) -> tuple[str, str]:
    texts = {"message": "", "reasoning": ""}
    for item in reply["output"]:
        texts[item["type"]] += "".join(part["text"] for part in item["content"])
    return texts["message"], texts["reasoning"]


def read_blocks(blocks: list[dict[str, Any]]) -> tuple[str, str]:
    return "".join(each.get("text", "") for each in blocks), "".join(each.get("thinking", "") for each in blocks)


READERS: dict[str, Any] = {
    "/v1/chat/completions": read_chat,
    "/v1/chat/completions/batch": read_chat,
    "/v1/responses": read_responses,
    "/v1/messages": lambda reply: read_blocks(reply["content"]),
    "/v2/chat": lambda reply: read_blocks(reply["message"].get("content", [])),
    "/api/chat": lambda reply: (reply["message"]["content"], reply["message"].get("thinking", "")),
    "/api/generate": lambda reply: (reply["response"], reply.get("thinking", "")),
}
DIALECTS = [
    Dialect("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES}),
    Dialect("/v1/chat/completions/batch", {"model": MODEL, "messages": [MESSAGES]}),
    Dialect("/v1/responses", {"model": MODEL, "input": "hi"}),
    Dialect("/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 100}),
    Dialect("/v2/chat", {"model": MODEL, "messages": MESSAGES}),
    Dialect("/api/chat", {"model": MODEL, "messages": MESSAGES, "stream": False}),
    Dialect("/api/generate", {"model": MODEL, "prompt": "hi", "stream": False}),
]
ON: dict[str, Any] = {"enable_thinking": True}
# fields -> (content, reasoning)
CASES: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"enable_thinking": True}, ("on", "hm")),
    ({"thinking": {"type": "enabled"}}, ("on", "hm")),
    ({"reasoning": {"enabled": True}}, ("on", "hm")),
    ({"reasoning": {"effort": "low"}}, ("on", "hm")),
    ({"reasoning_effort": "high"}, ("on", "hm")),
    ({"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, ("on", "hm")),
    ({"enable_thinking": False}, ("off", "")),
    ({"thinking": {"type": "disabled"}}, ("off", "")),
    ({"reasoning": {"enabled": False}}, ("off", "")),
    ({"reasoning_effort": "none"}, ("off", "")),
    ({"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, ("off", "")),
    ({**ON, "include_reasoning": True}, ("on", "hm")),
    ({**ON, "include_reasoning": False}, ("on", "")),
    ({**ON, "reasoning": {"exclude": True}}, ("on", "")),
    ({**ON, "reasoning_format": "hidden"}, ("on", "")),
    ({**ON, "reasoning_format": "parsed"}, ("on", "hm")),
    ({**ON, "reasoning_format": "raw"}, ("<think>hm</think>on", "")),
    ({**ON, "separate_reasoning": False}, ("<think>hm</think>on", "")),
]
CONTRADICTIONS: list[dict[str, Any]] = [
    {"enable_thinking": True, "reasoning": {"enabled": False}},
    {"enable_thinking": True, "chat_template_kwargs": {"thinking": False}},
    {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
]


@pytest.fixture(scope="module")
def server(agent_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(agent_checkpoint, tmp_path_factory.mktemp("dialects"), REPLIES) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.path)
def test_fields_of_reasoning(server: RunningServer, dialect: Dialect) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for fields, expected in CASES:
            reply = client.post(dialect.path, json=dialect.body | fields)
            assert reply.status_code == 200, (fields, reply.text)
            assert dialect.read(reply.json()) == expected, fields
            assert "x-frame-ignored-fields" not in reply.headers, fields
        for fields in CONTRADICTIONS:
            reply = client.post(dialect.path, json=dialect.body | fields)
            assert (reply.status_code, "contradict each other" in reply.text) == (400, True), (fields, reply.text)
        reply = client.post(dialect.path, json=dialect.body | {"guided_decoding_backend": "outlines"})
        assert reply.status_code == 200


def ask_cohere(server: RunningServer, text: str, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"[[say]]{text}[[end]]"}], **more}
    return httpx.post(server.url + "/v2/chat", json=body, timeout=60)


def test_cohere_chats(server: RunningServer) -> None:
    reply = ask_cohere(server, "one END two", stop_sequences=["END"], k=5, p=0.9, seed=1).json()
    assert reply["message"] == {"role": "assistant", "content": [{"type": "text", "text": "one "}]}
    assert (reply["finish_reason"], reply["usage"]["tokens"]["output_tokens"] > 1) == ("STOP_SEQUENCE", True)
    assert ask_cohere(server, "one two three", max_tokens=1).json()["finish_reason"] == "MAX_TOKENS"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_object", "json_schema": schema}
    assert ask_cohere(server, "no", response_format=form).json()["message"]["content"][0]["text"] == '{"a":1}'
    reply = ask_cohere(server, CALL, tools=[TOOL]).json()
    assert (reply["finish_reason"], "content" in reply["message"]) == ("TOOL_CALL", False)
    (call,) = reply["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"at": "x"})
    history = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_plan": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "document", "document": {"data": {"seen": "tree"}}}]},
    ]
    body = {"model": MODEL, "messages": history, "tools": [TOOL]}
    assert httpx.post(server.url + "/v2/chat", json=body, timeout=60).json()["message"]["content"][0]["text"] == "done"


def test_cohere_streams(server: RunningServer) -> None:
    reply = ask_cohere(server, f"<think>hm</think>I look. {CALL}", tools=[TOOL], enable_thinking=True, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]
    kinds = [each["type"] for each in events]
    assert (kinds[0], kinds[-1]) == ("message-start", "message-end")
    assert [kind for kind in kinds if kind.endswith(("-start", "-end"))][1:-1] == [
        "content-start", "content-end", "content-start", "content-end", "tool-call-start", "tool-call-end",
    ]  # fmt: skip
    contents = [each["delta"]["message"]["content"] for each in events if each["type"] == "content-delta"]
    assert "".join(each.get("thinking", "") for each in contents) == "hm"
    assert "".join(each.get("text", "") for each in contents).strip() == "I look."
    pieces = [each["delta"]["message"]["tool_calls"]["function"]["arguments"] for each in events if each["type"] == "tool-call-delta"]
    assert json.loads("".join(pieces)) == {"at": "x"}
    assert events[-1]["delta"]["finish_reason"] == "TOOL_CALL"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"k": "x"}, "k is a string"),
        ({"p": 2.0}, "p is 2.0"),
        ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'; it must be text or json_object"),
        ({"tool_choice": "ANY"}, "tool_choice"),
        ({"logprobs": True}, "logprobs is not supported here; use /v1/chat/completions"),
        ({"thinking": {"type": "enabled", "token_budget": "many"}}, "thinking.token_budget must be a whole number"),
        ({"messages": []}, "messages is empty"),
    ],
)
def test_cohere_chats_that_are_wrong(server: RunningServer, fields: dict[str, Any], says: str) -> None:
    reply = ask_cohere(server, "x", **fields) if "messages" not in fields else httpx.post(server.url + "/v2/chat", json=fields, timeout=60)
    assert (reply.status_code, set(reply.json())) == (400, {"id", "message"})
    assert says in reply.json()["message"]
