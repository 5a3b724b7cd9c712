"""Fields of coding agents in the Messages API, by the `anthropic` package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.entrypoints.serving import RunningServer

if TYPE_CHECKING:
    import anthropic

SERVER = {"type": "web_search_20250305", "name": "web_search"}
IGNORED = "x-frame-ignored-fields"


@pytest.fixture(scope="module")
def client(scripted_server: RunningServer) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=scripted_server.url, api_key="none", max_retries=0)


def ask(*messages: Any, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return {"model": "agent-model", "max_tokens": 400, "messages": turns, **more}


def say(text: str) -> str:
    return f"[[say]]{text}[[end]]"


@pytest.mark.slow
def test_edits_of_the_history(client: anthropic.Anthropic) -> None:
    import anthropic

    turns: list[Any] = []
    for thought in ("first " * 30, "second " * 30):
        thinking = {"type": "thinking", "thinking": thought, "signature": ""}
        turns += ["hm", {"role": "assistant", "content": [thinking, {"type": "text", "text": "ok"}]}]

    def count(*edits: Any) -> int:
        management = {"context_management": {"edits": list(edits)}} if edits else {}
        asked = ask(*turns, "hm")
        del asked["max_tokens"]
        return client.beta.messages.count_tokens(**asked, **management).input_tokens

    whole, one = count(), count({"type": "clear_thinking_20251015"})
    assert whole - one >= 30, "the thinking of the first turn is cleared"
    assert count({"type": "clear_thinking_20251015", "keep": "all"}) == whole
    assert count({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}) == whole
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
    raw = client.beta.messages.with_raw_response.create(**ask(say("ok")), context_management={"edits": edits})
    assert raw.headers[IGNORED] == "context_management.edits[1]"
    with pytest.raises(anthropic.BadRequestError, match=r"context_management.edits\[0\].keep.value is 0"):
        count({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}})


def test_tools_of_anthropics_servers(client: anthropic.Anthropic) -> None:
    import anthropic

    servers = [{"type": "url", "url": "https://127.0.0.1/none", "name": "mail"}]
    own = {"name": "look", "input_schema": {"type": "object"}}
    tools = [own, SERVER, {"type": "mcp_toolset", "mcp_server_name": "mail"}]
    raw = client.beta.messages.with_raw_response.create(**ask(say("ok")), tools=tools, mcp_servers=servers)
    assert raw.headers[IGNORED] == "mcp_servers, tools[1], tools[2]"
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        with pytest.raises(anthropic.BadRequestError, match="'web_search_20250305', which only Anthropic's servers run"):
            client.messages.create(**ask("hi"), tools=[SERVER], tool_choice=choice)


def test_tools_that_clients_run(client: anthropic.Anthropic) -> None:
    import anthropic

    tools: list[Any] = [{"type": "bash_20250124", "name": "bash"}, {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]
    call = {"name": "bash", "arguments": {"command": "ls"}}
    message = client.messages.create(**ask(say(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")), tools=tools)
    assert (message.stop_reason, message.content[0].name, message.content[0].input) == ("tool_use", "bash", {"command": "ls"})
    with pytest.raises(anthropic.BadRequestError, match="'computer_20250124', which is not supported"):
        client.messages.create(**ask("hi"), tools=[{"type": "computer_20250124", "name": "computer"}])


def test_what_claude_code_sends_besides(client: anthropic.Anthropic) -> None:
    import anthropic

    system = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    late = {"role": "system", "content": "There are agents."}
    asked = ask(say("ok"), late, system=system, thinking={"type": "adaptive"}, output_config={"effort": "high"}, metadata={"user_id": "{}"})
    with client.beta.messages.stream(**asked, betas=["effort-2025-11-24", "mid-conversation-system-2026-04-07"]) as stream:
        assert stream.get_final_message().content[0].text == "ok"
    with pytest.raises(anthropic.BadRequestError, match="output_config.effort is 'most'"):
        client.messages.create(**ask("hi"), extra_body={"output_config": {"effort": "most"}})
