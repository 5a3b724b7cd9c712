"""Fields of chats that clients of vLLM and SGLang add, by the `openai` package."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.serving import RunningServer

OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.fixture(scope="module")
def client(scripted_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted_server.url + "/v1", api_key="none", max_retries=0)


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "agent-model", "messages": [{"role": "user", "content": f"[[say]]{text}[[end]]"}], **more}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": OLDER},
        {"extra_body": {"structural_tag": json.dumps(OLDER)}},
        {"extra_body": {"structured_outputs": {"structural_tag": json.dumps(OLDER)}}},
    ],
)
def test_older_structural_tags(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    text = 'so <f>{"a": 1}</f>'
    assert client.chat.completions.create(**ask(text, **fields)).choices[0].message.content == text
    other = client.chat.completions.create(**ask('<f>{"b": 1}</f>', **fields)).choices[0].message.content
    assert other.startswith('<f>{"a"'), "the tag changes what the model says"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"triggers": []}, "response_format.triggers: expected a list of strings"),
        ({"structures": [{"begin": "<f>", "end": "</f>"}]}, r"response_format.structures\[0\].schema: expected a JSON schema"),
    ],
)
def test_older_structural_tags_that_are_wrong(client: openai.OpenAI, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**ask("hm", response_format=OLDER | change))


def test_custom_params_of_any_type(client: openai.OpenAI) -> None:
    """The processor of the server reads any key."""
    extra = {"custom_params": {"a": 1, "b": [True], "c": "text"}}
    assert client.chat.completions.create(**ask("hm", extra_body=extra)).choices[0].message.content == "hm"


def test_verbosity_reaches_the_template(client: openai.OpenAI) -> None:
    asked = ask("hm", verbosity="low")
    assert client.chat.completions.create(**asked).choices[0].message.content == "hm"
    counts = [
        client.responses.input_tokens.count(model="agent-model", input="hi", text=text).input_tokens for text in ({}, {"verbosity": "low"})
    ]
    assert counts[1] > counts[0], "the template of this server writes it"
    with pytest.raises(openai.BadRequestError, match="text.verbosity is 'most'"):
        client.responses.create(model="agent-model", input="hi", text={"verbosity": "most"})


def test_stream_interval(client: openai.OpenAI, scripted_server: RunningServer) -> None:
    """The first token at once, then so many tokens in one event."""
    text = " ".join(f"w{i}" for i in range(20))

    def pieces(**extra: Any) -> list[str]:
        chunks = client.chat.completions.create(**ask(text), stream=True, extra_body=extra)
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]

    single, several = pieces(), pieces(stream_interval=16)
    assert "".join(single) == "".join(several) == text
    assert 2 <= len(several) <= 2 + len(text) // 15 < len(single) // 2  # a token has a character at least
    assert len(several[0]) < len(several[1])
    body = {"text": f"[[say]]{text}[[end]]", "sampling_params": {"stream_interval": 16, "max_new_tokens": 100}, "stream": True}
    events = [line for line in httpx.post(scripted_server.url + "/generate", json=body, timeout=60).text.split("\n\n") if line]
    assert len(events) <= 4 + len(text) // 15
    assert json.loads(events[-2].removeprefix("data: "))["text"] == text
    with pytest.raises(openai.BadRequestError, match="stream_interval is 0; it must be from 1 to 1024"):
        pieces(stream_interval=0)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [2]}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\n?[ ]?"}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": r"\n?[ ]?"},
    ],
)
def test_whitespace_pattern(client: openai.OpenAI, scripted_server: RunningServer, fields: dict[str, Any]) -> None:
    text = '{"a": 1,\n "b": 2}'
    assert client.chat.completions.create(**ask(text, extra_body=fields)).choices[0].message.content == text
    other = client.chat.completions.create(**ask('{"a":\t1, "b": 2}', extra_body=fields), max_tokens=200).choices[0].message.content
    assert "\t" not in other, "a tab is not in the pattern"
    params = {"json_schema": SCHEMA, "whitespace_pattern": r"\n?[ ]?", "max_new_tokens": 100}
    body = {"text": f"[[say]]{text}[[end]]", "sampling_params": params}
    assert httpx.post(scripted_server.url + "/generate", json=body, timeout=60).json()["text"] == text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern needs json_schema or json_object"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern needs json_schema"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": 1}}, "structured_outputs.whitespace_pattern: expected a string"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " " * 257}, "guided_whitespace_pattern has 257 characters; it may have 256"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "("}, "unclosed group"),
    ],
)
def test_whitespace_patterns_that_are_wrong(client: openai.OpenAI, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**ask("hm", extra_body=fields))
