"""One meaning of the fields for reasoning, by the client library of each API."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.serving import RunningServer

THOUGHT = "<think>hm</think>7"
ON = [{"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"thinking": True}, {"reasoning": {"enabled": True}},
      {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}, {"chat_template_kwargs": {"thinking": True}}]  # fmt: skip
OFF = [{"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"thinking": False}, {"reasoning": {"enabled": False}},
       {"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}, {"reasoning_effort": "high", "enable_thinking": False},
       {"chat_template_kwargs": {"enable_thinking": False}}]  # fmt: skip
HIDDEN: list[dict[str, Any]] = [{"include_reasoning": False}, {"reasoning_format": "hidden"}, {"reasoning": {"exclude": True}}]
RAW: list[dict[str, Any]] = [{"separate_reasoning": False}, {"reasoning_format": "raw"}]


@pytest.fixture(scope="module")
def client(scripted_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted_server.url + "/v1", api_key="none", max_retries=0)


def ask(text: str = THOUGHT, **more: Any) -> dict[str, Any]:
    return {"model": "agent-model", "messages": [{"role": "user", "content": f"[[say]]{text}[[end]]"}], "extra_body": more}


@pytest.mark.parametrize("fields", [*ON, *OFF])
def test_switches(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    """The template of the server writes the switch, as both names have it."""
    on = fields in ON
    rendered = client.post("/chat/completions/render", body=ask() | fields | {"extra_body": None}, cast_to=object)
    assert isinstance(rendered, dict)
    text = httpx.post(str(client.base_url.join("/detokenize")), json={"tokens": rendered["token_ids"]}).json()
    assert f"[{on}{on}]" in str(text)


@pytest.mark.parametrize("fields", HIDDEN)
def test_hidden_reasoning(client: openai.OpenAI, scripted_server: RunningServer, fields: dict[str, Any]) -> None:
    import anthropic

    reply = client.chat.completions.create(**ask(**fields))
    assert reply.choices[0].message.content == "7"
    assert "reasoning_content" not in reply.choices[0].message.model_extra
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0, "it is counted"
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**ask(**fields), stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "7"
    assert not any("reasoning_content" in delta.model_extra for delta in deltas)
    text = ask()["messages"][0]["content"]
    responses = fields if "reasoning" in fields else {}
    extra = {} if responses else {"extra_body": fields}
    response = client.responses.create(model="agent-model", input=text, **responses, **extra)
    assert [item.type for item in response.output] == ["message"]
    messages = anthropic.Anthropic(base_url=scripted_server.url, api_key="none", max_retries=0).messages
    message = messages.create(model="agent-model", max_tokens=100, messages=ask()["messages"], extra_body=fields)
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.parametrize("fields", RAW)
def test_reasoning_in_the_content(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    assert client.chat.completions.create(**ask(**fields)).choices[0].message.content == THOUGHT


def test_reasoning_is_shown_by_default(client: openai.OpenAI) -> None:
    for fields in ({}, {"include_reasoning": True}, {"reasoning_format": "parsed"}):
        message = client.chat.completions.create(**ask(**fields)).choices[0].message
        assert (message.content, message.reasoning_content) == ("7", "hm")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking and thinking.type contradict"),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs.thinking contradict"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort and reasoning.effort contradict"),
        ({"thinking": {"type": "some"}}, "thinking.type is 'some'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens is not supported by this model: </think> is not a"),
        ({"thinking_token_budget": 9}, "thinking_token_budget is not supported by this model: </think> is not a single token"),
        ({"thinking_token_budget": -2}, "thinking_token_budget is -2; it must be a whole number from 0"),
        ({"reasoning": {"max_tokens": "9"}}, "reasoning.max_tokens is '9'; it must be a whole number from 0"),
        ({"reasoning": {"max_tokens": 9}, "thinking_token_budget": 8}, "thinking_token_budget and reasoning.max_tokens contradict"),
        ({"reasoning": {"enabled": 1}}, "reasoning.enabled: expected true or false"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort is 'some'"),
        ({"reasoning_format": "some"}, "reasoning_format"),
    ],
)
def test_bad_requests(client: openai.OpenAI, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**ask(**fields))
