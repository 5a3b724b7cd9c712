"""Parsers of model output: reasoning and tool calls, as incremental text filters (`reasoning_parser/2`, `tool_call_parser/2`).

Laws:
- For every split of a text into chunks, the concatenated deltas are those of the whole text.
- A text that `grammar` allows, is read by the same parser as what the grammar was made for: calls that the rule allows, or the answer.
- A parser never raises on any text, and spends time and memory in proportion to it.

A grammar here is a format of a structural tag: a JSON object whose `type` says what it is (`json_schema`, `tag`, `sequence`, `or`, …).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from frame.core.interfaces.plugin import Reason

REASONING_API = "reasoning_parser/2"
TOOL_CALL_API = "tool_call_parser/2"

Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParserCapabilities:
    """How a parser is recognised: `marks` are texts that a chat template holds (all of them) when its model writes this form, `never`
    are texts that it does not hold. Without marks a parser is used only where it is named. `is_general`: it may stand in where a template
    shows no form at all, since it takes nothing for a call by mistake and its calls can be enforced."""

    marks: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    is_general: bool = False

    def suits(self, template: str) -> bool:
        return bool(self.marks) and all(mark in template for mark in self.marks) and not any(mark in template for mark in self.never)

    def unsupported(self, requirements: Any) -> list[Reason]:
        """Nothing: who names a parser gets it."""
        return []


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What a piece of text adds to the reasoning and to the answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """Separates a model's thinking from its answer; one object a response."""

    keeps_special_tokens: ClassVar[bool] = False  # its marks are special tokens, which have to stay in the text

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        """Told before the first `feed` how the prompt ends, special tokens included: it may have opened the thinking, or closed it.
        `may_think` is false where the client switched thinking off."""

    def grammar(self, answer: Format, *, is_calls: bool) -> Format:
        """The format of a whole output whose `answer` (or calls) is constrained: what comes before and after it is this parser's to say."""
        return answer

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta: ...

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """What was held back."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `parameters` is a JSON schema; with `is_strict` arguments have to follow it."""

    name: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class CallRule:
    """Which calls an answer may hold: of `functions`; `is_required`: calls and nothing else; without `is_parallel` one at most."""

    functions: tuple[Function, ...]
    is_required: bool = False
    is_parallel: bool = True


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

    keeps_special_tokens: ClassVar[bool] = False

    def begin(self, functions: Sequence[Function]) -> None:
        """Told before the first `feed` what may be called."""

    def grammar(self, rule: CallRule) -> Format | None:
        """The format of answers that hold calls as `rule` wants them; None when this form cannot be constrained."""
        return None

    @abstractmethod
    def feed(self, text: str) -> ToolDelta: ...

    @abstractmethod
    def finish(self) -> ToolDelta: ...

    def finish_cut(self) -> ToolDelta:
        """Called instead of `finish` when the answer was cut off, by `max_tokens` or an abort: marks and beginnings of calls are not
        content."""
        return self.finish()


def held_back(text: str, *marks: str) -> int:
    """How many characters at the end of `text` may be the start of one of `marks`."""
    return max(next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0) for mark in marks)
