"""Reasoning parsers: text between two marks at the start, and parsers with a bug each."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from frame.interfaces.parsing import (
    Format,
    ParserCapabilities,
    ParserContext,
    ReasoningDelta,
    ReasoningMarks,
    ReasoningParser,
    held_back,
)
from tests.testing.held_out import Wrong

BEGIN, END = "<ponder>", "</ponder>"


class Ponder(ReasoningParser):
    """An output may begin with reasoning between the marks, which the prompt may have opened."""

    capabilities: ClassVar[ParserCapabilities] = ParserCapabilities(marks=(BEGIN,))

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        self.state = "start"  # or "reasoning", "answer"
        self.held = ""

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        end = prompt_end.rstrip()
        if not may_think or end.endswith(END):
            self.state = "answer"
        elif end.endswith(BEGIN):
            self.state = "reasoning"

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        if self.state == "answer":
            return reply
        begin = BEGIN if self.state == "start" else ""
        return {"type": "sequence", "elements": [{"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": END}, reply]}

    def find_marks(self) -> ReasoningMarks | None:
        if self.state == "answer":
            return ReasoningMarks()
        return ReasoningMarks(BEGIN if self.state == "start" else "", END)

    def feed(self, text: str) -> ReasoningDelta:
        text, self.held = self.held + text, ""
        if self.state == "start":
            if len(text) < len(BEGIN) and BEGIN.startswith(text):
                self.held = text
                return ReasoningDelta()
            self.state = "reasoning" if text.startswith(BEGIN) else "answer"
            text = text.removeprefix(BEGIN)
        if self.state == "answer":
            return ReasoningDelta(content=text)
        return self.read_reasoning(text)

    def read_reasoning(self, text: str) -> ReasoningDelta:
        before, mark, after = text.partition(END)
        if mark:
            self.state = "answer"
            return ReasoningDelta(before, after)
        kept = len(text) - held_back(text, END)
        self.held = text[kept:]
        return ReasoningDelta(text[:kept])

    def finish(self) -> ReasoningDelta:
        held, self.held = self.held, ""
        return ReasoningDelta(held) if self.state == "reasoning" else ReasoningDelta(content=held)


TWIN = Ponder
WRONG = Wrong()


@WRONG.add("The whole answer is shown as reasoning where the closing mark comes in two pieces: none is held back.")
class HoldsNothing(Ponder):
    def read_reasoning(self, text: str) -> ReasoningDelta:
        delta = super().read_reasoning(text)
        held, self.held = self.held, ""
        return ReasoningDelta(delta.reasoning + held, delta.content)


@WRONG.add("An output that ends in `<` loses its last letters: what was held back is not returned at the end.")
class LosesHeld(Ponder):
    def finish(self) -> ReasoningDelta:
        self.held = ""
        return ReasoningDelta()


@WRONG.add("Long reasoning slows the server down: the mark is searched in the whole text with each token.")
class SearchesAll(Ponder):
    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.all, self.sent = "", 0

    def read_reasoning(self, text: str) -> ReasoningDelta:
        self.all += text
        at = self.all.find(END)
        if at >= 0:
            self.state = "answer"
            return ReasoningDelta(self.all[self.sent : at], self.all[at + len(END) :])
        end = len(self.all) - held_back(self.all, END)
        reasoning, self.sent = self.all[self.sent : end], end
        return ReasoningDelta(reasoning)

    def finish(self) -> ReasoningDelta:
        return ReasoningDelta(self.all[self.sent :]) if self.state == "reasoning" else super().finish()


@WRONG.add("The reasoning is shown as the answer with templates that write a line break after the opening mark.")
class NeedsMarkAtEnd(Ponder):
    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        if not may_think or prompt_end.endswith(END):
            self.state = "answer"
        elif prompt_end.endswith(BEGIN):
            self.state = "reasoning"


@WRONG.add("A grammar demands reasoning from a model that the client has told not to think.")
class AlwaysThinks(Ponder):
    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        super().begin(prompt_end)


@WRONG.add("Pieces of one response appear in another: what is held back is kept by the class.")
class SharesHeld(Ponder):
    shared: ClassVar[list[str]] = []

    def read_reasoning(self, text: str) -> ReasoningDelta:
        delta = super().read_reasoning("".join(self.shared) + text)
        self.shared[:] = [self.held]
        self.held = ""
        return delta

    def finish(self) -> ReasoningDelta:
        self.held = "".join(self.shared) if self.state == "reasoning" else self.held
        self.shared.clear()
        return super().finish()


@WRONG.add("The answer begins with blank lines or not, depending on how the tokens came: space after the mark is cut in its piece.")
class StripsInPiece(Ponder):
    def read_reasoning(self, text: str) -> ReasoningDelta:
        delta = super().read_reasoning(text)
        return ReasoningDelta(delta.reasoning, delta.content.lstrip())


@WRONG.add("An answer that explains the marks loses them: marks in the answer are removed too.")
class RemovesMarks(Ponder):
    def feed(self, text: str) -> ReasoningDelta:
        if self.state == "answer":
            return ReasoningDelta(content=text.replace(END, ""))
        return super().feed(text)


@WRONG.add("A constrained request never ends where the prompt opened the reasoning: the grammar asks for the opening mark again.")
class OpensTwice(Ponder):
    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        tag = {"type": "tag", "begin": BEGIN, "content": {"type": "any_text"}, "end": END}
        return reply if self.state == "answer" else {"type": "sequence", "elements": [tag, reply]}


@WRONG.add("A response with half of a surrogate pair ends with an error: the size is measured in UTF-8.")
class MeasuresBytes(Ponder):
    num_bytes = 0

    def feed(self, text: str) -> ReasoningDelta:
        self.num_bytes += len(text.encode())
        return super().feed(text)


@WRONG.add("The first words of answers without reasoning are lost: what is held at the start is dropped when it is no mark.")
class DropsStart(Ponder):
    def feed(self, text: str) -> ReasoningDelta:
        if self.state == "start" and self.held and not BEGIN.startswith(self.held + text) and not (self.held + text).startswith(BEGIN):
            self.held = ""
        return super().feed(text)


@WRONG.add("The client sees nothing until the reasoning has ended: it is returned in one piece.")
class HoldsAll(Ponder):
    def read_reasoning(self, text: str) -> ReasoningDelta:
        before, mark, after = text.partition(END)
        if mark:
            self.state = "answer"
            return ReasoningDelta(before, after)
        self.held = text
        return ReasoningDelta()
