"""Reasoning parsers with one deliberate bug each. Used by the tests of the conformance suite.

The correct one is `think-tags`: reasoning between `<think>` and `</think>`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from typing import ClassVar

from frame.interfaces.parsing import Format, ReasoningDelta
from frame.plugins.reasoning_parsers.think_tags import ThinkTags
from tests.testing.mutants import MutantList

mutant = MUTANTS = MutantList("reasoning_parser", reference=ThinkTags)


@mutant
class HoldsTheReply(ThinkTags):
    """Returns nothing until the response has ended."""

    text = ""

    def feed(self, text: str) -> ReasoningDelta:
        self.text += text
        return ReasoningDelta()

    def finish(self) -> ReasoningDelta:
        first = super().feed(self.text)
        rest = super().finish()
        return ReasoningDelta(first.reasoning + rest.reasoning, first.content + rest.content)


@mutant
class HoldsTheReasoning(ThinkTags):
    """Returns the reasoning when it has ended."""

    kept = ""

    def feed(self, text: str) -> ReasoningDelta:
        found = super().feed(text)
        self.kept += found.reasoning
        return replace(found, reasoning="")

    def finish(self) -> ReasoningDelta:
        found = super().finish()
        return replace(found, reasoning=self.kept + found.reasoning)


@mutant
class DropsTheEnd(ThinkTags):
    """Drops the text that it holds when the response ends."""

    def finish(self) -> ReasoningDelta:
        super().finish()
        return ReasoningDelta()


@mutant
class DropsUnfinishedReasoning(ThinkTags):
    """Returns reasoning only once its closing tag has come."""

    kept = ""

    def feed(self, text: str) -> ReasoningDelta:
        found = super().feed(text)
        self.kept += found.reasoning
        reasoning = self.kept if found.content else ""
        self.kept = "" if found.content else self.kept
        return replace(found, reasoning=reasoning)


@mutant
class LooksAtPieces(ThinkTags):
    """Looks for the closing tag within one piece of text."""

    is_open = True

    def feed(self, text: str) -> ReasoningDelta:
        head, tag, tail = text.partition("</think>")
        if self.is_open and tag:
            self.is_open = False
            return ReasoningDelta(head.removeprefix("<think>"), tail)
        return super().feed(text)


@mutant
class ReturnsAllSoFar(ThinkTags):
    """Returns the content so far with each piece instead of what is new."""

    sent = ""

    def feed(self, text: str) -> ReasoningDelta:
        found = super().feed(text)
        self.sent += found.content
        return replace(found, content=self.sent)


@mutant
class KeepsTheTags(ThinkTags):
    """Leaves the closing tag at the start of the content."""

    is_first = True

    def feed(self, text: str) -> ReasoningDelta:
        found = super().feed(text)
        if found.content and found.reasoning and self.is_first:
            self.is_first = False
            return replace(found, content="</think>" + found.content)
        return found


@mutant
class SwapsTheParts(ThinkTags):
    """Returns the reasoning as content and the content as reasoning."""

    def feed(self, text: str) -> ReasoningDelta:
        found = super().feed(text)
        return ReasoningDelta(found.content, found.reasoning)


@mutant
class IgnoresThePrompt(ThinkTags):
    """Ignores a prompt that opens the reasoning when it reads, but not in its grammar."""

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        form = super().grammar(reply, is_calls=is_calls)
        self._state = 0
        return form

    def feed(self, text: str) -> ReasoningDelta:
        if not self._held and self._is_first and self._state == 1:
            self._state = 0
            self._is_first = False
        return super().feed(text)


@mutant
class ThinksWhenItIsOff(ThinkTags):
    """Takes the text for reasoning though the client switched reasoning off."""

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        super().begin(prompt_end, may_think)
        if not may_think:
            self._state = 1


@mutant
class LosesTheFormat(ThinkTags):
    """Allows any text after the reasoning."""

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        return super().grammar({"type": "any_text"}, is_calls=is_calls)


@mutant
class LosesTheCalls(ThinkTags):
    """Keeps the format of answers, but not that of calls."""

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        return super().grammar({"type": "any_text"} if is_calls else reply, is_calls=is_calls)


@mutant
class AllowsAnotherTag(ThinkTags):
    """Constrains the model to a tag that the parser does not read."""

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        form = super().grammar(reply, is_calls=is_calls)
        thinking: Format = {"type": "tag", "begin": "<thinking>", "content": {"type": "any_text"}, "end": "</thinking>"}
        return form if form is reply else {"type": "sequence", "elements": [thinking, reply]}


@mutant
class SharesTheText(ThinkTags):
    """Keeps the state in a dictionary of the class, which all responses share."""

    shared: ClassVar[dict[str, int]] = {}

    def feed(self, text: str) -> ReasoningDelta:
        self._state = self.shared.get("state", self._state)
        found = super().feed(text)
        self.shared["state"] = self._state
        return found

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        super().begin(prompt_end, may_think)
        self.shared["state"] = self._state


@mutant
class StripsPieces(ThinkTags):
    """Strips each piece of text."""

    def feed(self, text: str) -> ReasoningDelta:
        return super().feed(text.strip())


@mutant
class JoinsWords(ThinkTags):
    """Drops line breaks of the content."""

    def feed(self, text: str) -> ReasoningDelta:
        found = super().feed(text)
        return replace(found, content=found.content.replace("\n", ""))


@mutant
class DropsCharacters(ThinkTags):
    """Keeps ASCII characters alone."""

    def feed(self, text: str) -> ReasoningDelta:
        return super().feed(text.encode("ascii", "ignore").decode())


@mutant
class ReadsLatin(ThinkTags):
    """Fails on characters that it does not expect."""

    def feed(self, text: str) -> ReasoningDelta:
        for character in text:
            unicodedata.name(character if character not in "\r\n\t" else " ")
        return super().feed(text)


@mutant
class ExpectsATag(ThinkTags):
    """Fails on a prompt that ends with a bracket that begins no tag."""

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        super().begin(prompt_end, may_think)
        if "[" in prompt_end:
            prompt_end.index("[THINK]")


@mutant
class ReadsAllAgain(ThinkTags):
    """Searches all text again for each piece."""

    text = ""

    def feed(self, text: str) -> ReasoningDelta:
        self.text += text
        re.findall(r"[{\[]\d", self.text)
        return super().feed(text)


@mutant
class MayAlwaysThink(ThinkTags):
    """Lets the model reason where the client switched reasoning off."""

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        super().begin(prompt_end)


@mutant
class CallsWithoutReasoning(ThinkTags):
    """Allows calls alone where the prompt has opened the reasoning."""

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        return reply if is_calls else super().grammar(reply, is_calls=is_calls)


@mutant
class SearchesThePrompt(ThinkTags):
    """Takes a tag within the prompt for one that opens the reasoning."""

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        head, tag, tail = prompt_end.rpartition("<think>")
        super().begin(head + tag if tag and "</think>" not in tail else prompt_end, may_think)


@mutant
class ChangesLineEnds(ThinkTags):
    """Drops carriage returns."""

    def feed(self, text: str) -> ReasoningDelta:
        return super().feed(text.replace("\r", ""))


@mutant
class ComposesLetters(ThinkTags):
    """Brings each piece of text into the Unicode form NFC."""

    def feed(self, text: str) -> ReasoningDelta:
        return super().feed(unicodedata.normalize("NFC", text))


@mutant
class ExpectsText(ThinkTags):
    """Fails where a response ends before its first token."""

    first: str

    def feed(self, text: str) -> ReasoningDelta:
        self.first = text
        return super().feed(text)

    def finish(self) -> ReasoningDelta:
        assert isinstance(self.first, str)
        return super().finish()


TEXTS: list[str] = []


@mutant
class KeepsTextsInItsModule(ThinkTags):
    """Keeps all pieces of text in a list of its module."""

    def feed(self, text: str) -> ReasoningDelta:
        TEXTS.append(text)
        return super().feed(text)
