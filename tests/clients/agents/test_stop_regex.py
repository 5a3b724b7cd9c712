"""`stop_regex` in every API, through the socket of a server whose model says what it is asked."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.serving import RunningServer

PHONE = r"\d{3}-\d{4}"
TEXT = "[[say]]Call 555-1234 now[[end]]"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def client(scripted_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted_server.url + "/v1", api_key="none", max_retries=0)


def test_chats_and_completions(client: openai.OpenAI) -> None:
    chat: Any = client.chat.completions
    for pattern in (PHONE, ["no", PHONE]):
        choice = chat.create(model="agent-model", messages=MESSAGES, extra_body={"stop_regex": pattern}).choices[0]
        assert (choice.message.content, choice.finish_reason, choice.matched_stop) == ("Call ", "stop", PHONE)
    whole = {"stop_regex": PHONE, "include_stop_str_in_output": True}
    stream = chat.create(model="agent-model", messages=MESSAGES, stream=True, extra_body=whole)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == "Call 555-1234"
    said = client.completions.create(model="agent-model", prompt=TEXT, max_tokens=64, extra_body={"stop_regex": PHONE})
    assert said.choices[0].text == "Call "


def test_other_apis(scripted_server: RunningServer, client: openai.OpenAI) -> None:
    import anthropic

    said = client.responses.create(model="agent-model", input=TEXT, extra_body={"stop_regex": PHONE})
    assert said.output_text == "Call "
    claude = anthropic.Anthropic(base_url=scripted_server.url, api_key="none", max_retries=0)
    message = claude.messages.create(model="agent-model", max_tokens=64, messages=MESSAGES, extra_body={"stop_regex": PHONE})  # type: ignore[arg-type]
    assert [block.text for block in message.content if block.type == "text"] == ["Call "]
    body = {"text": TEXT, "sampling_params": {"stop_regex": PHONE, "max_new_tokens": 64}}
    native = httpx.post(scripted_server.url + "/generate", json=body, timeout=60).json()
    assert (native["text"], native["meta_info"]["finish_reason"]) == ("Call ", {"type": "stop", "matched": PHONE})


def test_hostile_patterns(scripted_server: RunningServer, client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": f"[[say]]{'a' * 400}![[end]]"}]
    began = time.monotonic()
    said = client.chat.completions.create(model="agent-model", messages=asked, extra_body={"stop_regex": "(a+)+b$"}, timeout=60)
    assert said.choices[0].message.content == "a" * 400 + "!"
    assert time.monotonic() - began < 30
    with pytest.raises(openai.BadRequestError, match="stop_regex has more than 50 characters, classes and assertions"):
        client.chat.completions.create(model="agent-model", messages=asked, extra_body={"stop_regex": "(a{1,99}){1,99}b"})
    body = {"text": "x", "sampling_params": {"stop_regex": "("}}
    refused = httpx.post(scripted_server.url + "/generate", json=body, timeout=60)
    assert refused.status_code == 400
    assert "sampling_params.stop_regex" in refused.text
