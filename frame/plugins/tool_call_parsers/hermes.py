"""`hermes`: tool calls in the Hermes format, which Qwen and many others use: `<tool_call>{"name":
…, "arguments": {…}}</tool_call>`.

Arguments are passed on character by character as they are written. A block that is no call is text,
tags included; whitespace around a call belongs to it.
"""

from __future__ import annotations

from frame.interfaces.parsing import CallRule, Format, Function
from frame.plugins.tool_call_parsers.formats import marked, tag
from frame.plugins.tool_call_parsers.object_run import ObjectCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ObjectCalls):
    """Parses the tags. Holds back only text that may become a tag, and whitespace before a tag."""

    def grammar(self, rule: CallRule) -> Format:
        return marked(rule, _call, OPEN, "\n")

    def start(self) -> bool:
        if self.emit_until(OPEN) is None:
            return False
        return self.begin_objects(self.take_held(self.held.index(OPEN) + len(OPEN)), "")

    def end_objects(self, num_calls: int) -> bool:
        return self.set_state(self._tail if num_calls else self.start)

    def _tail(self) -> bool:
        """State: drop the text before the closing tag."""
        return self.end_call(CLOSE)

    def end(self) -> None:
        if self.read != self._tail:
            super().end()


def _call(function: Function, arguments: Format) -> Format:
    return tag(f'{OPEN}\n{{"name": "{function.name}", "arguments": ', arguments, f"}}\n{CLOSE}")
