"""Reads `{"name": …, "arguments": …}` character by character and returns the text of the arguments
as it arrives.

Used by the parsers of calls in JSON. Other keys are skipped. Arguments that are JSON inside a JSON
string are unwrapped.
"""

from __future__ import annotations

import json
from collections.abc import Container

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallScanner:
    """`feed` text until `is_closed` or `is_bad`. `is_started`: the name is known and the arguments
    begin (or are missing). With `names`, an object with another name is not a call."""

    def __init__(self, names: Container[str] | None = None) -> None:
        self.name: str | None = None
        self._names = names
        self._raw: list[str] = []
        self.is_started = False
        self.is_closed = False
        self.is_bad = False
        self._read = self._object
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._out: list[str] = []  # arguments; may come before the name

    def feed(self, text: str) -> int:
        """Read up to the end of the object. Returns how many characters were read, including a
        wrong one."""
        size = len(text)
        for count, char in enumerate(text, 1):
            self._read(char)
            if self.is_closed or self.is_bad:
                size = count
                break
        if not self.is_started:
            self._raw.append(text[:size])
        return size

    @property
    def raw(self) -> str:
        """The text read so far, if it has not become a call."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """Remove and return the text of the arguments. Empty before `is_started`."""
        if not self.is_started:
            return ""
        text = "".join(self._out)
        self._out.clear()
        return text

    # ---- one reader for each position in the object ----

    def _object(self, char: str) -> None:
        self._expect(char, "{", self._first_key)

    def _first_key(self, char: str) -> None:
        if char == "}":
            self._close()
        else:
            self._next_key(char)

    def _next_key(self, char: str) -> None:
        if char == '"':
            self._begin_value(self._in_key)
        self._expect(char, '"', self._read)

    def _in_key(self, char: str) -> None:
        if self._take_string(char):
            self._key = self._decoded()
            self._read = self._colon

    def _colon(self, char: str) -> None:
        self._expect(char, ":", self._value_start)

    def _value_start(self, char: str) -> None:
        if char in _SPACE:
            return
        if char == '"':
            self._begin_value(self._in_text)
        elif char in "{[":
            self._begin_value(self._in_nested)
            self._in_nested(char)
        elif char in "}],:":
            self.is_bad = True
        else:
            self._begin_value(self._in_scalar)
            self._in_scalar(char)

    def _in_text(self, char: str) -> None:
        if self._take_string(char):
            text = self._decoded()
            if self._key == "name":
                self._named(text)
            elif self._key in _ARGUMENTS:
                self._argue(text)
            self._read = self._after_value

    def _in_nested(self, char: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            else:
                self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._key in _ARGUMENTS:
            self._argue(char)
        if not self._depth:
            self._read = self._after_value

    def _in_scalar(self, char: str) -> None:
        if char in _SPACE or char in ",}":
            self._read = self._after_value
            self._after_value(char)
        elif char in "<>{[\"'":
            self.is_bad = True
        elif self._key in _ARGUMENTS:
            self._argue(char)

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._read = self._next_key
        elif char == "}":
            self._close()
        elif char not in _SPACE:
            self.is_bad = True

    # ---- helpers of the readers ----

    def _expect(self, char: str, expected: str, then: object) -> None:
        if char == expected:
            self._read = then  # type: ignore[assignment]
        elif char not in _SPACE:
            self.is_bad = True

    def _begin_value(self, reader: object) -> None:
        self._read = reader  # type: ignore[assignment]
        self._value.clear()
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def _take_string(self, char: str) -> bool:
        """Whether this is the closing quote of the string."""
        if char == '"' and not self._is_escaped:
            return True
        self._is_escaped = char == "\\" and not self._is_escaped
        self._value.append(char)
        return False

    def _decoded(self) -> str:
        try:
            return str(json.loads('"' + "".join(self._value) + '"', strict=False))
        except ValueError:
            self.is_bad = True
            return ""

    def _named(self, name: str) -> None:
        if self.is_started or not name or (self._names is not None and name not in self._names):
            self.is_bad = True
            return
        self.name = name
        self.is_started = bool(self._out)

    def _argue(self, text: str) -> None:
        self._out.append(text)
        self.is_started = self.name is not None

    def _close(self) -> None:
        if self.name is None:
            self.is_bad = True
            return
        if not self.is_started:
            self.is_started = True
            self._out.append("{}")
        self.is_closed = True
