"""The state machine of tool call parsers: text is held until the current state can classify it.

A state is a method that consumes some of `held` and returns whether to continue. It decides by the
text alone, not by how it is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pydantic import BaseModel

from frame.interfaces.parsing import Function, ParserContext, ToolCallDelta, ToolCallParser, ToolDelta, held_back

MAX_GAP = 64  # whitespace characters before a mark that belong to the mark

_OUTSIDE, _INSIDE = re.compile(r'[{}\[\]"]'), re.compile(r'["\\]')


class Machine(ToolCallParser):
    """`read` is the current state. `emit_content`, `start_call` and `emit_arguments` collect the
    result. `follows_call`: the text follows a call, to which whitespace at its start belongs."""

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.held = ""
        self.read: Callable[[], bool] = self.start
        self.names: frozenset[str] = frozenset()
        self.follows_call = False
        self._num_calls = 0
        self._searched = 0  # characters of `held` without a mark
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    def begin(self, functions: Sequence[Function]) -> None:
        self.names = frozenset(function.name for function in functions)

    def feed(self, text: str) -> ToolDelta:
        self.held += text
        while self.read():
            pass
        return self._taken()

    def finish(self) -> ToolDelta:
        self.end()
        self.held = ""
        return self._taken()

    def finish_cut(self) -> ToolDelta:
        """Drop the held text: it may begin a call."""
        self.held = ""
        return self._taken()

    def start(self) -> bool:
        """The initial state."""
        raise NotImplementedError

    def end(self) -> None:
        """The text has ended: emit the held text that is content."""
        self.emit_content(self.held)

    def set_state(self, state: Callable[[], bool]) -> bool:
        """Change the state. Returns true."""
        self.read, self._searched = state, 0
        return True

    def emit_content(self, text: str) -> None:
        if text:
            self._content.append(text)

    def start_call(self, name: str, arguments: str = "") -> None:
        self._calls.append(ToolCallDelta(self._num_calls, name, arguments))
        self._num_calls += 1

    def emit_arguments(self, arguments: str) -> None:
        """Append to the arguments of the last call."""
        if arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, None, arguments))

    def take_held(self, count: int) -> str:
        """Remove and return the first `count` held characters."""
        taken, self.held = self.held[:count], self.held[count:]
        self._searched = 0
        return taken

    def find_mark(self, *marks: str) -> tuple[int, str] | None:
        """Return the first of `marks` in the held text with its index, the longest of several at
        one index. Continues the last search."""
        start = max(0, self._searched - max(map(len, marks)) + 1)
        places = [(at, -len(mark), mark) for mark in marks if (at := self.held.find(mark, start)) >= 0]
        self._searched = len(self.held)
        if not places:
            return None
        at, _, mark = min(places)
        return at, mark

    def emit_until(self, *marks: str) -> str | None:
        """Emit the text up to the first of `marks` and return that mark. None: no mark yet. The
        mark, and whitespace before it, stay held."""
        if self.follows_call:
            self.follows_call = not self.strip_held()
        nearest = self.find_mark(*marks)
        until = len(self.held) - held_back(self.held, *marks) if nearest is None else nearest[0]
        near = max(0, until - MAX_GAP)
        self.emit_content(self.take_held(near + len(self.held[near:until].rstrip())))
        return None if nearest is None else nearest[1]

    def drop_until(self, *marks: str) -> str | None:
        """Drop the text up to the first of `marks`, which stays held, and return that mark. None:
        no mark yet."""
        nearest = self.find_mark(*marks)
        self.take_held(len(self.held) - held_back(self.held, *marks) if nearest is None else nearest[0])
        return None if nearest is None else nearest[1]

    def end_call(self, close: str, *openings: str) -> bool:
        """State after a call: drop the text up to `close`, and that mark, or to the first of the
        openings, which stays held."""
        mark = self.drop_until(close, *openings)
        if mark is None:
            return False
        if mark == close:
            self.take_held(len(mark))
        self.follows_call = True
        return self.set_state(self.start)

    def strip_held(self, characters: str | None = None) -> bool:
        """Drop leading whitespace (or `characters`). Returns whether text is left."""
        self.take_held(len(self.held) - len(self.held.lstrip(characters)))
        return bool(self.held)

    def _taken(self) -> ToolDelta:
        delta = ToolDelta("".join(self._content), tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return delta


class JsonSpan:
    """Finds the end of one JSON object or array, from its first character on."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skips = False  # the next character is escaped

    def feed(self, text: str) -> int | None:
        """Return how many characters of this piece belong to the value. None: the value is not
        closed yet."""
        place = 0
        while True:
            if self._skips:
                if place >= len(text):
                    return None
                self._skips, place = False, place + 1
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if match is None:
                return None
            place, char = match.end(), match.group()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._skips = True
            else:
                self._depth += 1 if char in "{[" else -1
                if not self._depth:
                    return place
