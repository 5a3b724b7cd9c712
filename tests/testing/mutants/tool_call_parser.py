"""Tool-call parsers with one deliberate bug each. Used by the tests of the conformance suite.

The correct ones are in the tree: `hermes`, and `deepseek_v31`, whose marks are special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from frame.interfaces.parsing import CallRule, Format, Function, ToolCallDelta, ToolDelta
from frame.plugins.tool_call_parsers.deepseek_v31 import DeepSeekV31
from frame.plugins.tool_call_parsers.hermes import OPEN, Hermes
from tests.testing.mutants import MutantList

mutant = MUTANTS = MutantList("tool_call_parser", reference=Hermes)


@mutant
class HoldsTheReply(Hermes):
    """Returns nothing until the answer has ended."""

    text = ""

    def feed(self, text: str) -> ToolDelta:
        self.text += text
        return ToolDelta()

    def finish(self) -> ToolDelta:
        first = super().feed(self.text)
        rest = super().finish()
        return ToolDelta(first.content + rest.content, first.calls + rest.calls)


@mutant
class DropsTheSecondCall(Hermes):
    """Keeps the first call of an answer alone."""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        return replace(found, calls=tuple(call for call in found.calls if call.index == 0))


@mutant
class DropsTheLastPiece(Hermes):
    """Drops the text that it holds when the answer ends."""

    def finish(self) -> ToolDelta:
        super().finish()
        return ToolDelta()


@mutant
class NumbersFromOne(Hermes):
    """Numbers the calls from 1."""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        return replace(found, calls=tuple(replace(call, index=call.index + 1) for call in found.calls))


@mutant
class OneIndexForAll(Hermes):
    """Gives all calls the index 0."""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        return replace(found, calls=tuple(replace(call, index=0) for call in found.calls))


@mutant
class RepeatsTheName(Hermes):
    """Sends the name with each piece of the arguments."""

    def start_call(self, name: str, arguments: str = "") -> None:
        self.name = name
        super().start_call(name, arguments)

    def emit_arguments(self, arguments: str) -> None:
        if arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, self.name, arguments))


@mutant
class CutsTheArguments(Hermes):
    """Loses the last character of the arguments, which it takes for the end of the call."""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        calls = tuple(replace(call, arguments=call.arguments[:-1]) if call.arguments.endswith("}") else call for call in found.calls)
        return replace(found, calls=calls)


@mutant
class EndsAtTheFirstBrace(Hermes):
    """Ends the arguments at the first closing brace, also within a string or an inner object."""

    def emit_arguments(self, arguments: str) -> None:
        self._emit(arguments)

    def start_call(self, name: str, arguments: str = "") -> None:
        self.is_over = False
        super().start_call(name)
        self._emit(arguments)

    def _emit(self, arguments: str) -> None:
        if not self.is_over:
            head, brace, _ = arguments.partition("}")
            super().emit_arguments(head + brace)
            self.is_over = bool(brace)


@mutant
class EscapesCharacters(Hermes):
    """Decodes the backslashes of the arguments, and so breaks their JSON."""

    def emit_arguments(self, arguments: str) -> None:
        super().emit_arguments(arguments.replace("\\", ""))

    def start_call(self, name: str, arguments: str = "") -> None:
        super().start_call(name, arguments.replace("\\", ""))


@mutant
class DropsNoArguments(Hermes):
    """Drops calls without arguments."""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        arguments = {call.index: "" for call in found.calls}
        for call in found.calls:
            arguments[call.index] += call.arguments
        return replace(found, calls=tuple(call for call in found.calls if arguments[call.index].strip(" \r\n\t{}")))


@mutant
class MarksAreContent(Hermes):
    """Leaves the closing mark of a call in the content."""

    def end(self) -> None:
        super().end()
        if self._num_calls:
            self.emit_content("</tool_call>")


@mutant
class ExpectsWholeMarks(Hermes):
    """Looks for a mark within one piece of text, and so misses a mark that is split."""

    def feed(self, text: str) -> ToolDelta:
        if OPEN not in text and not self._num_calls and "<" not in self.held:
            return ToolDelta(text)
        return super().feed(text)


@mutant
class StripsPieces(Hermes):
    """Strips each piece of text."""

    def feed(self, text: str) -> ToolDelta:
        return super().feed(text.strip(" "))


@mutant
class StripsTheContent(Hermes):
    """Strips whitespace at the end of the answer."""

    def finish(self) -> ToolDelta:
        found = super().finish()
        return replace(found, content=found.content.rstrip())


@mutant
class ReturnsAllSoFar(Hermes):
    """Returns the content so far with each piece instead of what is new."""

    sent = ""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        self.sent += found.content
        return replace(found, content=self.sent)


@mutant
class ContentAfterACall(Hermes):
    """Drops the text after a call."""

    def feed(self, text: str) -> ToolDelta:
        had = self._num_calls
        found = super().feed(text)
        return replace(found, content="" if had else found.content)


@mutant
class AnyObjectIsACall(Hermes):
    """Takes each JSON object for a call."""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        if found.content.lstrip().startswith("{"):
            return ToolDelta("", (ToolCallDelta(self._num_calls, "f", found.content),))
        return found


@mutant
class CutCallsAreContent(Hermes):
    """Returns the start of a call as content when the answer is cut off."""

    def finish_cut(self) -> ToolDelta:
        return super().finish()


@mutant
class SharesTheText(Hermes):
    """Keeps the held text in a list of the class, which all responses share."""

    pieces: ClassVar[list[str]] = []

    def feed(self, text: str) -> ToolDelta:
        self.pieces.append(self.held)
        self.held = self.pieces.pop(0)
        return super().feed(text)

    def begin(self, functions: Sequence[Function]) -> None:
        super().begin(functions)
        self.pieces.append("")


@mutant
class ReadsAllAgain(Hermes):
    """Searches all text again for each piece."""

    text = ""

    def feed(self, text: str) -> ToolDelta:
        self.text += text
        re.findall(r"[{\[]\d", self.text)
        return super().feed(text)


@mutant
class RaisesOnOddJson(Hermes):
    """Parses objects without handling errors."""

    def feed(self, text: str) -> ToolDelta:
        if text.startswith("{") and len(text) > 1:
            json.loads(text)
        return super().feed(text)


@mutant
class RecursesIntoBraces(Hermes):
    """Calls itself for each opening brace, and so fails on deep nesting."""

    def feed(self, text: str) -> ToolDelta:
        self._measure(text, 0)
        return super().feed(text)

    def _measure(self, text: str, at: int) -> int:
        start = text.find("{", at)
        return 1 + self._measure(text, start + 1) if start >= 0 else 0


@mutant
class TrustsSchemas(Hermes):
    """Expects each property of a function to be an object."""

    def begin(self, functions: Sequence[Function]) -> None:
        super().begin(functions)
        self.types = [schema.get("type") for function in functions for schema in function.parameters.get("properties", {}).values()]


@mutant
class ExpectsFunctions(Hermes):
    """Fails when a request has no functions."""

    def begin(self, functions: Sequence[Function]) -> None:
        super().begin(functions)
        self.first = functions[0].name


@mutant
class HasAnotherGrammar(Hermes):
    """Constrains the model to another key than the one that the parser reads."""

    def grammar(self, rule: CallRule) -> Format:
        form: Format = json.loads(json.dumps(super().grammar(rule)).replace('\\"arguments\\"', '\\"args\\"'))
        return form


@mutant
class LosesSpecialTokens(DeepSeekV31):
    """Does not ask for special tokens, so that its marks never arrive."""

    keeps_special_tokens = False


@mutant
class SwapsNames(Hermes):
    """Returns names in lower case without their last letter."""

    def start_call(self, name: str, arguments: Any = "") -> None:
        super().start_call(name[:-1] or "_", arguments)


@mutant
class IsNeverStrict(Hermes):
    """Holds no function to its schema unless calls are required."""

    def grammar(self, rule: CallRule) -> Format | None:
        return super().grammar(replace(rule, functions=tuple(replace(each, is_strict=False) for each in rule.functions)))


@mutant
class DropsPartsOfCharacters(Hermes):
    """Drops U+FFFD at the end of a piece, as if the rest of the character were to come."""

    def feed(self, text: str) -> ToolDelta:
        return super().feed(text.rstrip("\ufffd"))


@mutant
class HoldsArguments(Hermes):
    """Returns the arguments of a call in one piece, when the call has ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.late = ""

    def emit_arguments(self, arguments: str) -> None:
        self.late += arguments

    def emit_late(self) -> None:
        if self.late:
            super().emit_arguments(self.late)
        self.late = ""

    def end_objects(self, *arguments: Any) -> Any:
        self.emit_late()
        return super().end_objects(*arguments)

    def end(self) -> None:
        self.emit_late()
        super().end()


@mutant
class ChangesLineEnds(Hermes):
    """Drops carriage returns."""

    def feed(self, text: str) -> ToolDelta:
        return super().feed(text.replace("\r", ""))


@mutant
class ClosesSchemas(Hermes):
    """Writes `additionalProperties` into the client's schemas."""

    def grammar(self, rule: CallRule) -> Format:
        for function in rule.functions:
            function.parameters.setdefault("additionalProperties", False)
        return super().grammar(rule)


@mutant
class RenamesFunctions(Hermes):
    """Allows names of Python alone: other characters become underscores."""

    def grammar(self, rule: CallRule) -> Format:
        functions = tuple(replace(function, name=re.sub(r"\W", "_", function.name)) for function in rule.functions)
        return super().grammar(replace(rule, functions=functions))


@mutant
class CountsByFunction(Hermes):
    """Counts the calls of each function by themselves."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counts: dict[str, int] = {}
        self.last = 0

    def _number(self, call: ToolCallDelta) -> ToolCallDelta:
        if call.name is not None:
            self.last = self.counts[call.name] = self.counts.get(call.name, -1) + 1
        return replace(call, index=self.last)

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        return replace(found, calls=tuple(map(self._number, found.calls)))


@mutant
class NullForNoArguments(Hermes):
    """Gives a call without arguments null in their place."""

    def feed(self, text: str) -> ToolDelta:
        found = super().feed(text)
        return replace(found, calls=tuple(replace(call, arguments=call.arguments.replace("{}", "null")) for call in found.calls))
