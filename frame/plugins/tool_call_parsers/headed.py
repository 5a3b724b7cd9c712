"""Calls of the form `OPEN header {arguments} CLOSE`, where the header holds the name: DeepSeek, newer Mistral, gpt-oss.

What follows an opening mark and is no such call is text, marks included; whitespace around a call belongs to it.
"""

from __future__ import annotations

import re
from typing import ClassVar

from frame.plugins.tool_call_parsers.machine import JsonSpan, Machine

LONGEST_HEADER = 256  # characters; more than that without a bracket is text


class HeadedCalls(Machine):
    """`header` has a group `name` and matches all that stands between the opening mark and the arguments. `around` are marks that
    enclose all calls and say nothing. Without `close` a call ends with its arguments."""

    opening: ClassVar[str]
    header: ClassVar[re.Pattern[str]]
    close: ClassVar[str | None] = None
    around: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self._span = JsonSpan()
        self.follows_call = False

    def start(self) -> bool:
        if self.follows_call:
            self.follows_call = not self.strip()
        mark = self.speak(self.opening, *self.around)
        if mark is None:
            return False
        if mark == self.opening:
            return self.go(self._header)
        self._skip(mark)
        return True

    def _skip(self, mark: str) -> None:
        """Leave out an enclosing mark, and the whitespace before it."""
        self.cut(self.held.index(mark) + len(mark))
        self.follows_call = True

    def _header(self) -> bool:
        """`held` is whitespace, the opening mark, and what has come of the header."""
        begin = self.held.index(self.opening) + len(self.opening)
        brace = self.held.find("{", begin, begin + LONGEST_HEADER)
        if brace < 0 and len(self.held) - begin < LONGEST_HEADER:
            return False
        found = self.header.fullmatch(self.held, begin, brace) if brace >= 0 else None
        if found is None:
            return self.reject(begin, brace)
        self.start_call(found["name"])
        self.cut(brace)
        self._span = JsonSpan()
        return self.go(self._arguments)

    def reject(self, begin: int, brace: int) -> bool:
        """The opening mark, which ends at `begin`, is text: what leads to the bracket at `brace` (-1: there is none) is no header."""
        self.say(self.cut(begin))
        return self.go(self.start)

    def _arguments(self) -> bool:
        size = self._span.feed(self.held)
        self.argue(self.cut(len(self.held) if size is None else size))
        return size is not None and self.go(self._after)

    def _after(self) -> bool:
        """Drop what stands between the arguments and the closing mark; another opening mark closes too."""
        if self.close is not None:
            mark = self.drop(self.close, self.opening)
            if mark is None:
                return False
            if mark == self.close:
                self.cut(len(mark))
        self.follows_call = True
        return self.go(self.start)

    def end(self) -> None:
        if self.read not in (self._arguments, self._after):
            self.say(self.held)
