"""Third-party parsers of tool calls and of reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from frame.interfaces.parsing import CallRule, Format, Function, ReasoningDelta, ToolDelta
from frame.plugins.reasoning_parsers.think_tags import ThinkTags
from frame.plugins.tool_call_parsers.hermes import Hermes
from tests.testing.third_party import sleeps, third_party

mutant = third_party("tool_call_parser")


@mutant
class SplitsTheCallAgain(Hermes):
    """Splits the whole text of a call with each piece of it, in a time that grows with the square
    of the call's length."""

    text = ""

    def feed(self, text: str) -> ToolDelta:
        self.text += text
        call = self.text.rpartition("<tool_call>")[2]
        call.split()
        return super().feed(text)


class ChangesCalls(Hermes):
    """Changes the calls of each delta."""

    def change(self, delta: ToolDelta) -> ToolDelta:
        raise NotImplementedError

    def feed(self, text: str) -> ToolDelta:
        return self.change(super().feed(text))

    def finish(self) -> ToolDelta:
        return self.change(super().finish())


@mutant
class CutsLongArguments(ChangesCalls):
    """Drops arguments after 65,536 characters."""

    length = 0

    def change(self, delta: ToolDelta) -> ToolDelta:
        calls = []
        for call in delta.calls:
            self.length = (0 if call.name else self.length) + len(call.arguments)
            calls.append(call if self.length <= 65_536 else replace(call, arguments=""))
        return replace(delta, calls=tuple(calls))


@mutant
class CompletesNames(ChangesCalls):
    """Takes the first function whose name begins with the same 16 characters."""

    names: Sequence[str] = ()

    def begin(self, functions: Sequence[Function]) -> None:
        self.names = [function.name for function in functions]
        super().begin(functions)

    def find(self, name: str | None) -> str | None:
        return next((known for known in self.names if name and known[:16] == name[:16]), name)

    def change(self, delta: ToolDelta) -> ToolDelta:
        return replace(delta, calls=tuple(replace(call, name=self.find(call.name)) for call in delta.calls))


@mutant
class CutsNames(ChangesCalls):
    """Cuts the names of functions at 32 characters."""

    def change(self, delta: ToolDelta) -> ToolDelta:
        return replace(delta, calls=tuple(replace(call, name=call.name and call.name[:32]) for call in delta.calls))


@mutant
class EndsAfter16Calls(ChangesCalls):
    """Drops calls after the sixteenth."""

    def change(self, delta: ToolDelta) -> ToolDelta:
        return replace(delta, calls=tuple(call for call in delta.calls if call.index < 16))


@mutant
class CachesGrammars(Hermes):
    """Keeps the grammar of a set of function names, whatever their parameters are."""

    known: ClassVar[dict[tuple[str, ...], Any]] = {}

    def grammar(self, rule: CallRule) -> Format:
        names = tuple(function.name for function in rule.functions)
        if len(self.known) > 100:
            self.known.clear()
        return self.known.setdefault((*names, str(rule.is_required), str(rule.is_parallel)), super().grammar(rule))  # type: ignore[no-any-return]


@mutant
class KeepsResponses(Hermes):
    """Keeps the text of each response in a list of the class."""

    texts: ClassVar[list[str]] = []

    def finish(self) -> ToolDelta:
        self.texts.append("done")
        return super().finish()


sleeps(mutant, "feed")

mutant = third_party("reasoning_parser")


@mutant
class CachesFormats(ThinkTags):
    """Keeps the format of a reply by its type, whatever its schema is."""

    known: ClassVar[dict[Any, Any]] = {}

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        return self.known.setdefault((reply["type"], is_calls, self._state, self._starts_open), super().grammar(reply, is_calls=is_calls))  # type: ignore[no-any-return]


@mutant
class WritesIntoTheReply(ThinkTags):
    """Adds a key to the format of the reply, which the caller uses again."""

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        reply.setdefault("is_reply", True)
        return super().grammar(reply, is_calls=is_calls)


@mutant
class CutsLongReasoning(ThinkTags):
    """Drops reasoning after 65,536 characters."""

    length = 0

    def feed(self, text: str) -> ReasoningDelta:
        delta = super().feed(text)
        self.length += len(delta.reasoning)
        return delta if self.length <= 65_536 else replace(delta, reasoning="")


@mutant
class RemembersItsState(ThinkTags):
    """Begins in the state that the response before was left in, if its client went away."""

    last: ClassVar[list[int]] = [0]

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        super().begin(prompt_end, may_think)
        self._state = self._state or self.last[0]

    def feed(self, text: str) -> ReasoningDelta:
        delta = super().feed(text)
        self.last[0] = self._state
        return delta

    def finish(self) -> ReasoningDelta:
        self.last[0] = 0
        return super().finish()


@mutant
class KeepsPrompts(ThinkTags):
    """Keeps the end of each prompt in a set of the class."""

    prompts: ClassVar[set[tuple[int, str]]] = set()

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        self.prompts.add((len(self.prompts), prompt_end))
        super().begin(prompt_end, may_think)


sleeps(mutant, "feed")
