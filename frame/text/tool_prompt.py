"""Writes tools, calls and results as plain messages, for chat templates without tool support.

The format is Hermes's `<tools>`, `<tool_call>` and `<tool_response>`. Used by `ChatTemplate`; must
not know a template.
"""

from __future__ import annotations

import json
from typing import Any

_INTRODUCTION = (
    "You may call functions to answer the user. Their signatures are within <tools> and </tools>:\n<tools>\n{tools}\n</tools>\n"
    'For each call, write {{"name": NAME, "arguments": ARGUMENTS}} as JSON within <tool_call> and </tool_call>.'
)
_KNOWN = ("system", "developer")


def as_plain_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the messages with tools in the system message, calls in the assistant's text and
    results as user messages."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0].get("role") in _KNOWN:
        first = plain[0]
        return [{**first, "content": _append(first.get("content") or "", f"\n\n{introduction}")}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        opening = "<tool_response>\n"
        opened = [{"type": "text", "text": opening}, *content] if isinstance(content, list) else f"{opening}{content}"
        return {"role": "user", "content": _append(opened, "\n</tool_response>")}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = []
    for call in calls:
        function = call.get("function") or {}
        body = {"name": function.get("name"), "arguments": function.get("arguments")}
        texts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    written = "\n".join(texts)
    return {"role": message["role"], "content": _append(content, f"\n{written}") if content else written}


def _append(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """A message's content, a text or parts, with a text after it."""
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
