"""`think-tags`: reasoning between tags at the start of the output, `<think>…</think>`, as in
DeepSeek-R1 and Qwen3.

Whitespace around the tags belongs to neither part. Output that does not start with the tag is
content, and later tags are text.
"""

from __future__ import annotations

from pydantic import BaseModel

from frame.interfaces.parsing import Format, ParserContext, ReasoningDelta, ReasoningMarks, ReasoningParser, held_back
from frame.plugins.reasoning_parsers import ThinkTagsOptions

_START, _THINKING, _GAP, _REPLY = range(4)


class ThinkTags(ReasoningParser):
    """Parses the tags. Holds back only text that may become a tag, and whitespace next to a tag."""

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._options = options if isinstance(options, ThinkTagsOptions) else ThinkTagsOptions()
        self._starts_open = self._options.starts_open
        self._opens_itself = self._options.opens_itself
        self._state = _START
        self._held = ""
        self._is_first = True  # no reasoning text was returned yet

    def begin(self, prompt_end: str, may_think: bool = True) -> None:
        """See `ReasoningParser.begin`. The end of the prompt, and reasoning that is switched off,
        override `starts_open`."""
        self._starts_open = self._starts_open and may_think
        self._opens_itself = self._opens_itself and may_think
        end = prompt_end.rstrip()
        if end.endswith(self._options.open):
            self._state = _THINKING
        elif end.endswith(self._options.close):
            self._state = _GAP

    def grammar(self, reply: Format, *, is_calls: bool) -> Format:
        is_open = self._state == _THINKING or (self._state == _START and self._starts_open)
        if self._state in (_GAP, _REPLY) or not (is_open or self._opens_itself):
            return reply
        begin = "" if is_open else self._options.open
        thinking: Format = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": self._options.close}
        gap: Format = {"type": "regex", "pattern": r"\n{0,2}"}
        if is_open:
            return {"type": "sequence", "elements": [thinking, gap, reply]}
        optional: Format = {"type": "optional", "content": {"type": "sequence", "elements": [thinking, gap]}}
        return {"type": "sequence", "elements": [optional, reply]}

    def find_marks(self) -> ReasoningMarks:
        if self._state == _THINKING or (self._state == _START and self._starts_open):
            return ReasoningMarks("", self._options.close)
        return ReasoningMarks(self._options.open, self._options.close) if self._state == _START else ReasoningMarks()

    def feed(self, text: str) -> ReasoningDelta:
        self._held += text
        reasoning = content = ""
        if self._state == _START:
            self._begin()
        if self._state == _THINKING:
            reasoning = self._think()
        if self._state == _GAP:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _REPLY
        if self._state == _REPLY:
            content, self._held = self._held, ""
        return ReasoningDelta(reasoning, content)

    def finish(self) -> ReasoningDelta:
        held, self._held = self._held, ""
        if self._state == _THINKING or (self._state == _START and self._starts_open):
            return ReasoningDelta(reasoning=held)
        return ReasoningDelta(content=held)

    def _begin(self) -> None:
        """Decide whether the text starts with the opening tag, once it is long enough."""
        tag, text = self._options.open, self._held.lstrip()
        if tag.startswith(text) and text != tag:
            return
        if text.startswith(tag):
            self._state, self._held = _THINKING, text[len(tag) :]
        else:
            self._state = _THINKING if self._starts_open else _REPLY

    def _think(self) -> str:
        tag = self._options.close
        if self._is_first:
            self._held = self._held.lstrip()
        end = self._held.find(tag)
        if end >= 0:
            reasoning = self._held[:end].rstrip()
            self._state, self._held = _GAP, self._held[end + len(tag) :]
        else:
            reasoning = self._held[: len(self._held) - held_back(self._held, tag)].rstrip()
            self._held = self._held[len(reasoning) :]
        self._is_first = self._is_first and not reasoning
        return reasoning
