"""The harmony format of gpt-oss: `<|start|>assistant<|channel|>NAME<|message|>text<|end|>`, where
the channel `analysis` is reasoning.

Messages to a function are passed on as content in the form that the tool call parser `gpt-oss`
reads. Other marks are dropped.
"""

from __future__ import annotations

import re

from pydantic import BaseModel

from frame.interfaces.parsing import Format, ParserContext, ReasoningDelta, ReasoningMarks, ReasoningParser, held_back

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
MAX_HEADER_LENGTH = 256

_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")


class GptOss(ReasoningParser):
    """Parses harmony messages. Text without a header is content."""

    keeps_special_tokens = True
    conformance_replies = (
        ("", f"{ANALYSIS}1{ENDS[0]}{START}assistant{ANALYSIS}2{ENDS[0]}{START}assistant{FINAL}3{ENDS[1]}", "1\n2", "3"),
        ("", f"{FINAL}1{ENDS[0]}{START}assistant{FINAL}2", "", "1\n2"),
        (START + "assistant" + ANALYSIS, f"1{ENDS[0]}{START}assistant{FINAL}2", "1", "2"),
        (START + "assistant" + FINAL, "1", "", "1"),
        (f"{START}assistant{ANALYSIS}0{ENDS[0]}{START}assistant", f"{ANALYSIS}1{ENDS[0]}{START}assistant{FINAL}2", "1", "2"),
        ("", f"{MESSAGE}1", "", "1"),
        ("", "a text without a header" * 20, "", "a text without a header" * 20),
        (
            "",
            f"{ANALYSIS}1{ENDS[0]}{START}assistant<|channel|>commentary to=functions.f <|constrain|>json{MESSAGE}{{}}{ENDS[2]}",
            "1",
            f"<|channel|>commentary to=functions.f{MESSAGE}{{}}<|call|>",
        ),
    )

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._held = ""
        self._may_think = True
        self._is_header = True
        self._is_thinking = False
        self._is_call = False
        self._count = {True: 0, False: 0}  # messages of reasoning and of content
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        """A prompt may end within a message."""
        self._may_think = may_think
        _, start, header = prompt_end.rpartition(START)
        if start and MESSAGE in header and not any(end in header for end in ENDS):
            self._open(header.partition(MESSAGE)[0])

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        is_open = self._is_thinking and not self._is_header  # the prompt ends within the reasoning
        if not (self._is_header or is_open or is_calls):
            return reply  # the prompt ends within the final message
        thinking: Format = {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "" if is_open else ANALYSIS, "content": {"type": "any_text"}, "end": ENDS[0]},
                {"type": "const_string", "value": START + "assistant"},
            ],
        }
        header: list[Format] = [] if is_calls else [{"type": "const_string", "value": FINAL}]
        optional: list[Format] = [{"type": "optional", "content": thinking}] if self._may_think else []
        return {"type": "sequence", "elements": [*([thinking] if is_open else optional), *header, reply]}

    def find_marks(self) -> ReasoningMarks:
        """Of the first message."""
        if self._is_header:
            return ReasoningMarks(ANALYSIS, ENDS[0]) if self._may_think else ReasoningMarks()
        return ReasoningMarks("", ENDS[0]) if self._is_thinking else ReasoningMarks()

    def feed(self, text: str) -> ReasoningDelta:
        self._held += text
        while self._header() if self._is_header else self._body():
            pass
        return self._taken()

    def finish(self) -> ReasoningDelta:
        held, self._held = self._held, ""
        if not self._is_header:
            self._say(held)
        elif not any(self._count.values()):  # there was no message
            self._content.append(held)
        return self._taken()

    def _header(self) -> bool:
        at = self._held.find(MESSAGE, 0, MAX_HEADER_LENGTH)
        if at >= 0:
            header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
            self._open(header)
            return True
        if len(self._held) < MAX_HEADER_LENGTH:
            return False
        self._open("")
        return True

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_call = recipient is not None
        self._is_thinking = recipient is None and channel is not None and channel[1] == "analysis"
        if recipient is not None:
            self._content.append(f"<|channel|>commentary to={recipient[1]}{MESSAGE}")
        elif self._count[self._is_thinking]:
            self._say("\n")
        self._count[self._is_thinking] += 1
        self._is_header = False

    def _body(self) -> bool:
        nearest = min(((at, end) for end in ENDS if (at := self._held.find(end)) >= 0), default=None)
        if nearest is None:
            until = len(self._held) - held_back(self._held, *ENDS)
            self._say(self._held[:until])
            self._held = self._held[until:]
            return False
        at, end = nearest
        self._say(self._held[:at])
        self._held = self._held[at + len(end) :]
        if self._is_call:
            self._content.append("<|call|>")
        self._is_header = True
        return True

    def _say(self, text: str) -> None:
        (self._reasoning if self._is_thinking else self._content).append(text)

    def _taken(self) -> ReasoningDelta:
        delta = ReasoningDelta("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return delta
