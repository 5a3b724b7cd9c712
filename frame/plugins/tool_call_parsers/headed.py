"""Calls of the form `OPEN header {arguments} CLOSE`, where the header holds the name: DeepSeek,
newer Mistral, gpt-oss.

What follows an opening mark and is no such call is text, marks included; whitespace around a call
belongs to it.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import BaseModel

from frame.interfaces.parsing import ParserContext
from frame.plugins.tool_call_parsers.machine import JsonSpan, Machine

MAX_HEADER = 256  # characters; a longer header without a bracket is text


class HeadedCalls(Machine):
    """`header`: matches the text between the opening mark and the arguments, with a group `name`.
    `around`: marks that enclose all calls and are dropped. Without `close` a call ends with its
    arguments."""

    opening: ClassVar[str]
    header: ClassVar[re.Pattern[str]]
    close: ClassVar[str | None] = None
    around: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._span = JsonSpan()

    def start(self) -> bool:
        mark = self.emit_until(self.opening, *self.around)
        if mark is None:
            return False
        if mark == self.opening:
            return self.set_state(self._header)
        self._skip(mark)
        return True

    def _skip(self, mark: str) -> None:
        """Drop an enclosing mark and the whitespace before it."""
        self.take_held(self.held.index(mark) + len(mark))
        self.follows_call = True

    def _header(self) -> bool:
        """State: `held` is whitespace, the opening mark, and the header so far."""
        begin = self.held.index(self.opening) + len(self.opening)
        brace = self.held.find("{", begin, begin + MAX_HEADER)
        if brace < 0 and len(self.held) - begin < MAX_HEADER:
            return False
        match = self.header.fullmatch(self.held, begin, brace) if brace >= 0 else None
        if match is None:
            return self.reject(begin, brace)
        self.start_call(match["name"])
        self.take_held(brace)
        self._span = JsonSpan()
        return self.set_state(self._arguments)

    def reject(self, begin: int, brace: int) -> bool:
        """The opening mark, which ends at `begin`, is text: the text up to the bracket at `brace`
        (-1: none) is not a header."""
        self.emit_content(self.take_held(begin))
        return self.set_state(self.start)

    def _arguments(self) -> bool:
        size = self._span.feed(self.held)
        self.emit_arguments(self.take_held(len(self.held) if size is None else size))
        return size is not None and self.set_state(self._after)

    def _after(self) -> bool:
        """State: drop the text between the arguments and the closing mark. Another opening mark
        closes too."""
        if self.close is not None:
            return self.end_call(self.close, self.opening)
        self.follows_call = True
        return self.set_state(self.start)

    def end(self) -> None:
        if self.read not in (self._arguments, self._after):
            self.emit_content(self.held)
