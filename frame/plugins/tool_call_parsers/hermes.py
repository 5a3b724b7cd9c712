"""Tool calls in the Hermes form, which Qwen and many others use: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Arguments are passed on character by character as they are written. A block that is no call is text, tags included;
whitespace around a call belongs to it.
"""

from __future__ import annotations

from frame.core.interfaces.parsing import CallRule, Format, Function, ToolCallDelta, ToolCallParser, ToolDelta, held_back
from frame.plugins.tool_call_parsers.call_scanner import CallScanner
from frame.plugins.tool_call_parsers.formats import marked, tag

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TEXT, _CALL, _TAIL = range(3)


class Hermes(ToolCallParser):
    """Holds back only what may turn out to be a tag, or whitespace before one."""

    def __init__(self) -> None:
        self._state = _TEXT
        self._held = ""
        self._gap = ""  # whitespace before the block that is being read
        self._follows_call = False  # whitespace now is whitespace after a call
        self._scanner = CallScanner()
        self._num_calls = 0

    def grammar(self, rule: CallRule) -> Format:
        return marked(rule, _call, OPEN, "\n")

    def feed(self, text: str) -> ToolDelta:
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._held:
            before = self._state, self._held
            if self._state == _TEXT:
                content.append(self._read_text())
            elif self._state == _CALL:
                content.append(self._read_call(calls))
            else:
                self._read_tail()
            if before == (self._state, self._held):
                break
        return ToolDelta("".join(content), tuple(calls))

    def finish(self) -> ToolDelta:
        held, self._held = self._held, ""
        if self._state == _CALL and not self._scanner.is_started:
            return ToolDelta(self._gap + OPEN + self._scanner.raw + held)
        return ToolDelta(held if self._state == _TEXT else "")

    def _read_text(self) -> str:
        if self._follows_call:
            self._held = self._held.lstrip()
        start = self._held.find(OPEN)
        until = start if start >= 0 else len(self._held) - held_back(self._held, OPEN)
        found = self._held[:until].rstrip()
        if start >= 0:
            self._gap, self._held = self._held[len(found) : start], self._held[start + len(OPEN) :]
            self._state, self._scanner = _CALL, CallScanner()
        else:
            self._held = self._held[len(found) :]
        self._follows_call = self._follows_call and not found
        return found

    def _read_call(self, calls: list[ToolCallDelta]) -> str:
        """Returns text when the block turns out to be no call."""
        scanner = self._scanner
        was_started = scanner.is_started
        self._held = self._held[scanner.feed(self._held) :]
        if scanner.is_bad and not scanner.is_started:
            self._state, self._follows_call = _TEXT, False
            return self._gap + OPEN + scanner.raw
        arguments = scanner.take()
        if scanner.is_started and not was_started:
            calls.append(ToolCallDelta(self._num_calls, scanner.name, arguments))
        elif arguments:
            calls.append(ToolCallDelta(self._num_calls, None, arguments))
        if scanner.is_bad or scanner.is_closed:
            self._state = _TAIL
            self._num_calls += scanner.is_started
        return ""

    def _read_tail(self) -> None:
        """Drop everything up to the closing tag."""
        end = self._held.find(CLOSE)
        if end >= 0:
            self._held = self._held[end + len(CLOSE) :]
            self._state, self._follows_call = _TEXT, True
        else:
            kept = held_back(self._held, CLOSE)
            self._held = self._held[len(self._held) - kept :]


def _call(function: Function, arguments: Format) -> Format:
    return tag(f'{OPEN}\n{{"name": "{function.name}", "arguments": ', arguments, f"}}\n{CLOSE}")
