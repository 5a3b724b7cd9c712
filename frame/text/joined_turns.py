"""Joins turns for chat templates that take one system message, at the start, and turns of user and
assistant that alternate. Coding agents send system messages within the conversation, and several
messages of the user in a row.

Used by `ChatTemplate` where a template refuses the messages as they are; must not know a template.
"""

from __future__ import annotations

from typing import Any

_LEADING = ("system", "developer")
_JOINED = ("system", "developer", "user")


def join_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a system message after the first turn as the user's, and with neighbours of
    one role as one message, where their content is text."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") in _LEADING and any(each.get("role") not in _LEADING for each in joined):
            message = {**message, "role": "user"}
        last = joined[-1] if joined else {}
        if message.get("role") in _JOINED and last.get("role") == message["role"] and _has_text(last) and _has_text(message):
            joined[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _has_text(message: dict[str, Any]) -> bool:
    return isinstance(message.get("content"), str)
