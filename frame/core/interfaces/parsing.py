"""Parsers of model output: reasoning and tool calls, as incremental text filters (`reasoning_parser/1`, `tool_call_parser/1`).

Law: for every split of a text into chunks, the concatenated deltas are those of the whole text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

REASONING_API = "reasoning_parser/1"
TOOL_CALL_API = "tool_call_parser/1"


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What a piece of text adds to the reasoning and to the answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """Separates a model's thinking from its answer; one object a response."""

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta: ...

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """What was held back."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Call `index`; `name` once, at its start; `arguments` are further characters of the JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """What a piece of text adds to the answer and to its tool calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser(ABC):
    """Finds tool calls in an answer; one object a response."""

    @abstractmethod
    def feed(self, text: str) -> ToolDelta: ...

    @abstractmethod
    def finish(self) -> ToolDelta: ...
