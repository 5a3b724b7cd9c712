"""The interfaces of reasoning parsers (kind `reasoning_parser`) and tool-call parsers (kind
`tool_call_parser`): incremental text filters.

Contract:
- For every split of a text into chunks, the concatenated deltas are those of the whole text.
- The parser reads every text that its `grammar` allows as the calls or the answer that the grammar
  was built for.
- A parser raises on no text, and its time and memory are linear in the text.

A grammar here is a format of a structural tag: a JSON object with a `type` (`json_schema`, `tag`,
`sequence`, `or`, …).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from frame.core.interfaces.plugin import Reason

Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParserCapabilities:
    """How `auto` recognises the parser of a chat template. A parser without marks is used only by
    name."""

    marks: tuple[str, ...] = ()  # texts that are all in the template of a model that writes this format
    never: tuple[str, ...] = ()  # texts that are not
    is_general: bool = False  # used for templates that show no format: it has no false positives, and its grammar enforces calls

    def suits(self, template: str) -> bool:
        return bool(self.marks) and all(mark in template for mark in self.marks) and not any(mark in template for mark in self.never)

    def unsupported(self, requirements: Any) -> list[Reason]:
        """Empty: a parser that is named is used."""
        return []


@dataclass(frozen=True, slots=True)
class ParserContext:
    """The model whose output a parser reads."""

    architecture: str = ""  # as in the checkpoint's config.json
    chat_template: str = ""  # Jinja source; "": the model has none


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts that open and close the reasoning of a response. `begin`: empty where the prompt
    has opened it. `end`: empty where there is no reasoning."""

    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The reasoning and the answer in a piece of text."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """Separates a model's reasoning from its answer. One object per response."""

    keeps_special_tokens: ClassVar[bool] = False  # its marks are special tokens, which must stay in the text

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None: ...

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        """Called before the first `feed` with the end of the prompt, special tokens included, which
        may open or close the reasoning by marks that white space alone follows. `may_think` is
        False where the client switched reasoning off: the grammar then allows none."""

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        """The format of a whole output, around the format of its `reply` (with `is_calls`: of its
        tool calls)."""
        return reply

    def find_marks(self) -> ReasoningMarks | None:
        """Called between `begin` and the first `feed`. None: this parser's reasoning cannot be
        limited in length."""
        return None

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta: ...

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """The text that was held back."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str  # 1 to 128 ASCII letters, digits and `_.:/-`
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object"})  # JSON schema
    is_strict: bool = False  # the arguments must follow the schema, also of calls that are not required


@dataclass(frozen=True, slots=True)
class CallRule:
    """The calls that an answer may contain."""

    functions: tuple[Function, ...]
    is_required: bool = False  # the answer is calls alone
    is_parallel: bool = True  # False: at most one call


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call."""

    index: int  # of the call in the answer
    name: str | None = None  # once, at the start of the call
    arguments: str = ""  # further characters of the JSON text, as soon as a model that writes JSON has written them


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """The answer and the tool calls in a piece of text."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser(ABC):
    """Finds tool calls in an answer. One object per response."""

    keeps_special_tokens: ClassVar[bool] = False

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None: ...

    def begin(self, functions: Sequence[Function]) -> None:
        """Called before the first `feed` with the functions that may be called."""

    def grammar(self, rule: CallRule) -> Format | None:
        """The format of answers with calls by `rule`, whose schemas are not changed; None: this
        parser's format cannot be constrained."""
        return None

    @abstractmethod
    def feed(self, text: str) -> ToolDelta: ...

    @abstractmethod
    def finish(self) -> ToolDelta: ...

    def finish_cut(self) -> ToolDelta:
        """Called instead of `finish` when `max_tokens` or an abort cut the answer off: marks and
        the start of a call are not content."""
        return self.finish()


def held_back(text: str, *marks: str) -> int:
    """The number of characters at the end of `text` that may be the start of one of `marks`, a part
    of a character (U+FFFD) included."""
    whole = text.removesuffix("\ufffd")
    size = max(next((size for size in range(min(len(mark) - 1, len(whole)), 0, -1) if whole.endswith(mark[:size])), 0) for mark in marks)
    return size and size + len(text) - len(whole)
