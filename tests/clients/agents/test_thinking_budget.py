"""Limits of reasoning tokens, through the socket of a server whose model says what it is asked and
whose tokenizer has the tags as tokens."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.clients.agents.conftest import MARKS
from tests.entrypoints.serving import RunningServer

THOUGHT = "<think>" + "a " * 30 + "</think>yes"
MODEL = "agent-model"


@pytest.fixture(scope="module")
def client(marked_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=marked_server.url + "/v1", api_key="none", max_retries=0)


def ask(text: str = THOUGHT) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"[[say]]{text}[[end]]"}], "max_tokens": 200}


FORMS: list[dict[str, Any]] = [
    {"thinking_token_budget": 5}, {"reasoning": {"max_tokens": 5}}, {"thinking": {"type": "enabled", "budget_tokens": 5}},
]  # fmt: skip


@pytest.mark.parametrize("fields", FORMS)
def test_a_budget_ends_the_reasoning(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole: Any = client.chat.completions.create(**ask()).choices[0].message
    assert (whole.reasoning_content, whole.content) == ("a " * 29 + "a", "yes")
    reply: Any = client.chat.completions.create(**ask(), extra_body=fields)
    message = reply.choices[0].message
    assert message.reasoning_content.startswith("a a")
    assert len(message.reasoning_content) <= 10
    assert message.content.startswith("a a"), "the script goes on after the token that was forced"
    assert reply.usage.completion_tokens_details.reasoning_tokens <= 7
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**ask(), extra_body=fields, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar",
    [
        {"structured_outputs": {"choice": ["yes indeed"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "yes indeed"}}}},
    ],
)
def test_a_grammar_describes_the_content_after_the_budget(client: openai.OpenAI, grammar: dict[str, Any]) -> None:
    """The prompt opens the reasoning, whose end the budget forces."""
    asked = ask("a " * 30 + "</think>yes")
    asked["messages"].append({"role": "assistant", "content": "<think>"})
    more = {"thinking_token_budget": 5, "continue_final_message": True, "add_generation_prompt": False, **grammar}
    message: Any = client.chat.completions.create(**asked, extra_body=more).choices[0].message
    assert message.reasoning_content.startswith("a a")
    assert len(message.reasoning_content) <= 10
    assert message.content.strip('"') == "yes indeed"


def test_a_grammar_of_the_whole_output_has_no_reasoning(client: openai.OpenAI) -> None:
    message: Any = client.chat.completions.create(**ask(), extra_body={"thinking_token_budget": 5, "regex": "[ab ]{40}"}).choices[0].message
    assert len(message.content) == 40


def test_reasoning_within_the_budget_and_none(client: openai.OpenAI) -> None:
    for budget in (100, -1):
        message: Any = client.chat.completions.create(**ask(), extra_body={"thinking_token_budget": budget}).choices[0].message
        assert (message.reasoning_content, message.content) == ("a " * 29 + "a", "yes")
    plain = client.chat.completions.create(**ask("no thought at all"), extra_body={"thinking_token_budget": 1}).choices[0].message
    assert plain.content == "no thought at all"
    none: Any = client.chat.completions.create(**ask(), extra_body={"thinking_token_budget": 0}).choices[0].message
    assert not (none.model_extra or {}).get("reasoning_content")


def test_other_apis(client: openai.OpenAI, marked_server: RunningServer) -> None:
    import anthropic

    response = client.responses.create(model=MODEL, input=ask()["messages"][0]["content"], extra_body={"reasoning": {"max_tokens": 5}})
    assert response.output_text.startswith("a a")
    claude = anthropic.Anthropic(base_url=marked_server.url, api_key="none", max_retries=0)
    message = claude.messages.create(**ask(), thinking={"type": "enabled", "budget_tokens": 5})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].type == "thinking"
    assert len(message.content[0].thinking) <= 10
    params = {
        "max_new_tokens": 60,
        "thinking_token_budget": 5,
        "thinking_start_ids": [MARKS["<think>"]],
        "thinking_end_id": MARKS["</think>"],
    }
    text = httpx.post(
        marked_server.url + "/generate", json={"text": f"[[say]]{THOUGHT}[[end]]", "sampling_params": params}, timeout=60
    ).json()["text"]
    assert text.index("</think>") < len("<think>") + 12
    del params["thinking_end_id"]
    refused = httpx.post(marked_server.url + "/generate", json={"text": "x", "sampling_params": params}, timeout=60)
    assert refused.status_code == 400
    assert "needs thinking_end_id" in refused.text
