"""An answer's text as chat deltas: thinking and tool calls are separated by the configured parsers, the rest is content.

Knows the shape of OpenAI deltas and no parser by name.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frame.core.interfaces.parsing import ReasoningParser, ToolCallParser, ToolDelta


class AnswerParser:
    """One a sequence. `deltas` of all pieces, joined, are the message that `message` returns."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def feed(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """The deltas that a piece of text adds; with `is_last` also what was held back."""
        deltas: list[dict[str, Any]] = []
        for thought, content in self._think(text, is_last):
            if thought:
                self._thoughts.append(thought)
                deltas.append({"reasoning_content": thought})
            self._speak(content, deltas)
        if is_last and self._tools is not None:
            self._take_calls(self._tools.finish(), deltas)
        return deltas

    def _think(self, text: str, is_last: bool) -> list[tuple[str, str]]:
        if self._reasoning is None:
            return [("", text)]
        parts = [self._reasoning.feed(text), *([self._reasoning.finish()] if is_last else [])]
        return [(part.reasoning, part.content) for part in parts]

    def _speak(self, content: str, deltas: list[dict[str, Any]]) -> None:
        if not content:
            return
        if self._tools is not None:
            self._take_calls(self._tools.feed(content), deltas)
        else:
            self._content.append(content)
            deltas.append({"content": content})

    def _take_calls(self, found: ToolDelta, deltas: list[dict[str, Any]]) -> None:
        if found.content:
            self._content.append(found.content)
            deltas.append({"content": found.content})
        for call in found.calls:
            known = self._calls.get(call.index)
            if known is None:
                function = {"name": call.name or "", "arguments": call.arguments}
                known = self._calls[call.index] = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
                deltas.append({"tool_calls": [{"index": call.index, **known, "function": dict(function)}]})
            else:
                known["function"]["arguments"] += call.arguments
                deltas.append({"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]})

    def message(self) -> dict[str, Any]:
        """The whole message, once the last piece was fed."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message
