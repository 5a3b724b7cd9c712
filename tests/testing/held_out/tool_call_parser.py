"""Tool-call parsers: `[call "NAME"]ARGUMENTS[/call]`, and parsers with a bug each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from frame.interfaces.parsing import (
    CallRule,
    Format,
    Function,
    ParserCapabilities,
    ParserContext,
    ToolCallDelta,
    ToolCallParser,
    ToolDelta,
    held_back,
)
from tests.testing.held_out import Wrong

START, END = '[call "', "[/call]"


class Bracketed(ToolCallParser):
    """A call is held back until it is complete. One that is none stays text."""

    capabilities: ClassVar[ParserCapabilities] = ParserCapabilities(marks=(START, END))
    parts: ClassVar[re.Pattern[str]] = re.compile(r'\\.|"|\[/call\]', re.DOTALL)

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        self.held = ""
        self.pieces: list[str] | None = None  # of the open call
        self.is_string = False
        self.num_calls = 0

    def grammar(self, rule: CallRule) -> Format | None:
        tags = [self.make_tag(function, rule) for function in rule.functions]
        if rule.is_required:
            return {
                "type": "tags_with_separator", "tags": tags, "separator": "\n",
                "at_least_one": True, "stop_after_first": not rule.is_parallel,
            }  # fmt: skip
        return {"type": "triggered_tags", "triggers": [START], "tags": tags, "stop_after_first": not rule.is_parallel}

    def make_tag(self, function: Function, rule: CallRule) -> Format:
        schema = function.parameters if function.is_strict or rule.is_required else {"type": "object"}
        begin = f"[call {json.dumps(function.name)}]"
        return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": END}

    def feed(self, text: str) -> ToolDelta:
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        text, self.held, at = self.held + text, "", 0
        while at < len(text):
            if self.pieces is None:
                at = self.read_content(text, at, content)
            else:
                at = self.read_call(text, at, content, calls)
        return ToolDelta("".join(content), tuple(calls))

    def read_content(self, text: str, at: int, content: list[str]) -> int:
        start = text.find(START, at)
        if start < 0:
            end = len(text) - self.count_held(text[at:], START)
            content.append(text[at:end])
            self.held = text[end:]
            return len(text)
        content.append(text[at:start])
        self.pieces, self.is_string = [], True  # the mark ends in a quote
        return start + len(START)

    def count_held(self, text: str, mark: str) -> int:
        return held_back(text, mark)

    def read_call(self, text: str, at: int, content: list[str], calls: list[ToolCallDelta]) -> int:
        assert self.pieces is not None
        seen = at
        for part in self.parts.finditer(text, at):
            seen = part.end()
            if part[0] == '"':
                self.is_string = not self.is_string
            elif part[0] == END and not self.is_string:
                self.pieces.append(text[at : part.start()])
                self.end_call("".join(self.pieces), content, calls)
                return seen
        rest = text[seen:]
        end = len(text) - (1 if rest.endswith("\\") else self.count_held(rest, END))
        self.pieces.append(text[at:end])
        self.held = text[end:]
        return len(text)

    def end_call(self, body: str, content: list[str], calls: list[ToolCallDelta]) -> None:
        self.pieces = None
        found = self.read_body(body)
        if found is None:
            content.append(START + body + END)
        else:
            calls.append(ToolCallDelta(self.count_call(), *found))

    def count_call(self) -> int:
        self.num_calls += 1
        return self.num_calls - 1

    def read_body(self, body: str) -> tuple[str, str] | None:
        """Name and arguments; None for what is no call."""
        try:
            name, end = json.JSONDecoder().raw_decode(f'"{body}')
            arguments = body[end:].strip()
            is_call = body[end - 1 : end] == "]" and isinstance(self.load(arguments), dict)
        except (ValueError, RecursionError):
            return None
        return (name, arguments) if is_call else None

    def load(self, arguments: str) -> Any:
        return json.loads(arguments)

    def finish(self) -> ToolDelta:
        text = self.held if self.pieces is None else "".join((START, *self.pieces, self.held))
        self.held, self.pieces = "", None
        return ToolDelta(text)

    def finish_cut(self) -> ToolDelta:
        self.held, self.pieces = "", None
        return ToolDelta()


TWIN = Bracketed
WRONG = Wrong()


@WRONG.add("An argument that holds the closing mark, such as code of this parser, cuts the call off: texts are not told apart.")
class EndsInText(Bracketed):
    parts = re.compile(r"\[/call\]")

    def read_content(self, text: str, at: int, content: list[str]) -> int:
        at = super().read_content(text, at, content)
        self.is_string = False
        return at


@WRONG.add("Calls are shown as text where a mark comes in two pieces: the start of a mark is not held back.")
class HoldsNothing(Bracketed):
    def count_held(self, text: str, mark: str) -> int:
        return 0


@WRONG.add("Clients merge several calls into one: each piece of text numbers its calls from 0.")
class NumbersByPiece(Bracketed):
    def feed(self, text: str) -> ToolDelta:
        self.num_calls = 0
        return super().feed(text)


@WRONG.add("A call with a large argument takes minutes: the pieces of the call are joined with each token.")
class JoinsAlways(Bracketed):
    def read_call(self, text: str, at: int, content: list[str], calls: list[ToolCallDelta]) -> int:
        assert self.pieces is not None
        whole, self.pieces, self.is_string = "".join(self.pieces) + text[at:], [], True
        return len(text) - (len(whole) - super().read_call(whole, 0, content, calls))


@WRONG.add("A response that max_tokens cuts off ends in raw marks: the start of a call is returned as text.")
class ShowsCutCalls(Bracketed):
    def finish_cut(self) -> ToolDelta:
        return self.finish()


@WRONG.add("Text is lost where the model opened a call by mistake: a call that is not closed is dropped.")
class DropsOpenCalls(Bracketed):
    def finish(self) -> ToolDelta:
        held = self.held if self.pieces is None else ""
        self.held, self.pieces = "", None
        return ToolDelta(held)


@WRONG.add("Large numbers in arguments, such as account ids, are changed: arguments are read as floats and written anew.")
class RewritesNumbers(Bracketed):
    def read_body(self, body: str) -> tuple[str, str] | None:
        found = super().read_body(body)
        return found and (found[0], json.dumps(json.loads(found[1], parse_int=lambda digits: int(float(digits)))))


@WRONG.add("A call of a function that the model made up ends the request with an error: its name is looked up.")
class LooksUpNames(Bracketed):
    def begin(self, functions: Sequence[Function]) -> None:
        self.functions = {function.name: function for function in functions}

    def read_body(self, body: str) -> tuple[str, str] | None:
        found = super().read_body(body)
        if found is not None and getattr(self, "functions", None):
            _ = self.functions[found[0]].parameters
        return found


@WRONG.add("The second response of a server has calls from number 1 on: calls are counted by the class.")
class CountsInClass(Bracketed):
    total: ClassVar[list[int]] = [0]

    def count_call(self) -> int:
        if not self.num_calls:
            self.num_calls, self.first = 1, self.total[0]
        self.total[0] += 1
        return self.total[0] - 1


@WRONG.add("Clients that ask for one call at a time get several: the grammar ignores the rule.")
class IgnoresParallel(Bracketed):
    def grammar(self, rule: CallRule) -> Format | None:
        return super().grammar(CallRule(rule.functions, rule.is_required, is_parallel=True))


@WRONG.add("Deeply nested arguments end the request with an error: only syntax errors are expected.")
class FailsOnDepth(Bracketed):
    def read_body(self, body: str) -> tuple[str, str] | None:
        try:
            name, end = json.JSONDecoder().raw_decode(f'"{body}')
            arguments = body[end:].strip()
            return (name, arguments) if body[end - 1 : end] == "]" and isinstance(json.loads(arguments), dict) else None
        except ValueError:
            return None


@WRONG.add("equivalent: names have no letters that JSON escapes; it writes them as they are.")
class WritesNames(Bracketed):
    def make_tag(self, function: Function, rule: CallRule) -> Format:
        return {**super().make_tag(function, rule), "begin": f'[call "{function.name}"]'}


@WRONG.add("Arguments do not follow the schema where a call is required: the grammar allows any object.")
class IgnoresSchema(Bracketed):
    def make_tag(self, function: Function, rule: CallRule) -> Format:
        return {**super().make_tag(function, rule), "content": {"type": "json_schema", "json_schema": {"type": "object"}}}
