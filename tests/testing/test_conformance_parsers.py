"""The parsers' suite finds what is wrong."""

from __future__ import annotations

import json

from pydantic import BaseModel

from frame.core.interfaces.parsing import (
    CallRule,
    Format,
    ParserContext,
    ReasoningDelta,
    ReasoningParser,
    ToolCallDelta,
    ToolCallParser,
    ToolDelta,
)
from frame.testing import conformance_parsers
from tests.testing.failures import failures


class Fine(ToolCallParser):
    """A call is a line `name arguments` after a mark; the text is read when it is whole."""

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        self.pieces: list[str] = []

    def grammar(self, rule: CallRule) -> Format | None:
        calls = [
            {
                "type": "tag",
                "begin": f"!{function.name} ",
                "content": {"type": "json_schema", "json_schema": function.parameters, "max_whitespace_cnt": 1},
                "end": "\n",
            }
            for function in rule.functions
        ]
        return {"type": "or", "elements": calls}

    def feed(self, text: str) -> ToolDelta:
        self.pieces.append(text)
        return ToolDelta()

    def finish(self) -> ToolDelta:
        text = "".join(self.pieces)
        name, _, arguments = text.removeprefix("!").partition(" ")
        try:
            json.loads(arguments)
        except ValueError:
            return ToolDelta(text)
        return ToolDelta("", (ToolCallDelta(0, name, arguments),)) if text.startswith("!") else ToolDelta(text)


class LooksAtPieces(Fine):
    def feed(self, text: str) -> ToolDelta:
        return ToolDelta(text.strip())

    def finish(self) -> ToolDelta:
        return ToolDelta()


class ReadsAgain(ReasoningParser):
    """Forgets the format of the answer, and looks through all that it holds for each piece."""

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        self.held = ""

    def grammar(self, answer: Format, *, is_calls: bool) -> Format:
        return {"type": "any_text"}

    def feed(self, text: str) -> ReasoningDelta:
        self.held += text
        sum(character == "x" for character in self.held)
        return ReasoningDelta()

    def finish(self) -> ReasoningDelta:
        return ReasoningDelta(self.held)


def test_a_sound_parser_passes() -> None:
    assert failures("tool_call_parser", Fine) == {}


def test_what_is_wrong_is_found(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    found = failures("tool_call_parser", LooksAtPieces)
    assert "in one piece" in found["splits"]
    assert "is read as content" in found["grammar_is_read"]
    monkeypatch.setattr(conformance_parsers, "LIMIT", 0.01)
    monkeypatch.setattr(conformance_parsers, "LONG", 4_000)
    found = failures("reasoning_parser", ReadsAgain)
    assert "again and again" in found["long_texts"]
    assert "loses" in found["grammar_keeps_the_answer"]
    assert "splits" not in found


def test_texts_are_drawn_from_a_format() -> None:
    texts = conformance_parsers.draw({"type": "regex", "pattern": "[ab]{3}"}, 5)
    assert len(texts) == 5
    assert all(len(text) == 3 and set(text) <= {"a", "b"} for text in texts)
