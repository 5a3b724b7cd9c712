"""`suffix`: the prompt has the model's tokens, which also end the response."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.clients.agents.conftest import MARKS
from tests.entrypoints.serving import RunningServer

BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
MODEL = "agent-model"


@pytest.fixture(scope="module")
def client(marked_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=marked_server.url + "/v1", api_key="none", max_retries=0)


def encode(server: RunningServer, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    tokens: list[int] = httpx.post(server.url + "/tokenize", json=body, timeout=60).json()["tokens"]
    return tokens


@pytest.mark.slow
def test_suffix(client: openai.OpenAI, marked_server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": BEFORE, "suffix": AFTER, "max_tokens": 8}
    choice: Any = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    expected = [MARKS["<|fim_prefix|>"], *encode(marked_server, BEFORE), MARKS["<|fim_suffix|>"], *encode(marked_server, AFTER)]
    ids = choice.prompt_token_ids
    assert ids[-len(expected) - 1 :] == [*expected, MARKS["<|fim_middle|>"]]
    assert choice.text == "done"
    said = "[[say]]a + b<|fim_suffix|> and more[[end]]"
    choice = client.completions.create(**asked | {"prompt": said, "max_tokens": 40}).choices[0]
    assert (choice.text.removesuffix("<|fim_suffix|>"), choice.finish_reason) == ("a + b", "stop")
    several = client.completions.create(**asked | {"prompt": [BEFORE, BEFORE]})
    assert [each.text for each in several.choices] == ["done", "done"]


def test_suffix_of_ollama(marked_server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": BEFORE, "suffix": AFTER, "stream": False}
    reply = httpx.post(marked_server.url + "/api/generate", json=body, timeout=60).json()
    assert reply["response"] == "done"
    assert reply["prompt_eval_count"] >= 3 + len(encode(marked_server, BEFORE)) + len(encode(marked_server, AFTER))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": [5, 6]}, "suffix needs a prompt of text"),
        ({"echo": True}, "suffix and echo exclude each other"),
        ({"extra_body": {"truncate_prompt_tokens": 5}}, "suffix and truncate_prompt_tokens exclude each other"),
    ],
)
def test_requests_that_are_refused(client: openai.OpenAI, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.completions.create(**{"model": MODEL, "prompt": BEFORE, "suffix": AFTER, "max_tokens": 8} | fields)


def test_models_without_such_tokens(scripted_server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": BEFORE, "suffix": AFTER}
    for path in ("/v1/completions", "/api/generate"):
        reply = httpx.post(scripted_server.url + path, json=body, timeout=60)
        assert reply.status_code == 400
        assert "suffix needs a model with fill-in-the-middle tokens" in reply.text
