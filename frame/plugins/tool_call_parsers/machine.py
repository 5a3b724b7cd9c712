"""What parsers of tool calls share: text is held until the reader of the present state can say what it is.

A state is a method that consumes some of `held` and returns whether to go on; it decides by the text alone, never by where a piece ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from frame.core.interfaces.parsing import Function, ToolCallDelta, ToolCallParser, ToolDelta, held_back

WIDEST_GAP = 64  # characters of whitespace before a mark that belong to the mark

_OUTSIDE, _INSIDE = re.compile(r'[{}\[\]"]'), re.compile(r'["\\]')


class Machine(ToolCallParser):
    """`read` is the present state. Content and calls are gathered by `say`, `start_call` and `argue`."""

    def __init__(self) -> None:
        self.held = ""
        self.read: Callable[[], bool] = self.start
        self.names: frozenset[str] = frozenset()
        self._num_calls = 0
        self._searched = 0  # characters of `held` that hold no mark
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
        """What is held may begin a call, and is dropped."""
        self.held = ""
        return self._taken()

    def start(self) -> bool:
        """The first state."""
        raise NotImplementedError

    def end(self) -> None:
        """The text is over: say what is still held, where it is content."""
        self.say(self.held)

    def go(self, state: Callable[[], bool]) -> bool:
        """Change the state; always true."""
        self.read, self._searched = state, 0
        return True

    def say(self, text: str) -> None:
        if text:
            self._content.append(text)

    def start_call(self, name: str, arguments: str = "") -> None:
        self._calls.append(ToolCallDelta(self._num_calls, name, arguments))
        self._num_calls += 1

    def argue(self, arguments: str) -> None:
        """Further text of the last call's arguments."""
        if arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, None, arguments))

    def cut(self, count: int) -> str:
        """Take characters off the front of what is held."""
        found, self.held = self.held[:count], self.held[count:]
        self._searched = 0
        return found

    def find(self, *marks: str) -> tuple[int, str] | None:
        """The first place of one of `marks`, the longest where two begin together; what was searched before is not searched again."""
        start = max(0, self._searched - max(map(len, marks)) + 1)
        found = [(at, -len(mark), mark) for mark in marks if (at := self.held.find(mark, start)) >= 0]
        self._searched = len(self.held)
        if not found:
            return None
        at, _, mark = min(found)
        return at, mark

    def speak(self, *marks: str) -> str | None:
        """Say all text up to the first of `marks` and return that; None when none has come. The mark stays held, and so does whitespace
        before it."""
        found = self.find(*marks)
        until = len(self.held) - held_back(self.held, *marks) if found is None else found[0]
        near = max(0, until - WIDEST_GAP)
        self.say(self.cut(near + len(self.held[near:until].rstrip())))
        return None if found is None else found[1]

    def drop(self, *marks: str) -> str | None:
        """Drop all text up to the first of `marks` and return that, which stays held; None when none has come."""
        found = self.find(*marks)
        self.cut(len(self.held) - held_back(self.held, *marks) if found is None else found[0])
        return None if found is None else found[1]

    def strip(self, characters: str | None = None) -> bool:
        """Drop whitespace (or `characters`) at the front; returns whether anything is left."""
        self.cut(len(self.held) - len(self.held.lstrip(characters)))
        return bool(self.held)

    def _taken(self) -> ToolDelta:
        found = ToolDelta("".join(self._content), tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return found


class JsonSpan:
    """Follows one JSON object or array, whose first character comes first, to its closing bracket."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skips = False  # the next character is escaped

    def feed(self, text: str) -> int | None:
        """How many characters of this piece belong to the value, once it is closed; None while it is open."""
        place = 0
        while True:
            if self._skips:
                if place >= len(text):
                    return None
                self._skips, place = False, place + 1
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                return None
            place, char = found.end(), found.group()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._skips = True
            else:
                self._depth += 1 if char in "{[" else -1
                if not self._depth:
                    return place
