"""`hermes`: tool calls in the Hermes format, which Qwen and many others use: `<tool_call>{"name":
…, "arguments": {…}}</tool_call>`.

Arguments are passed on character by character as they are written. A block that is no call is text,
tags included; whitespace around a call belongs to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.parsing import CallRule, Format, Function
from frame.plugins.tool_call_parsers.formats import marked, tag
from frame.plugins.tool_call_parsers.machine import Machine
from frame.plugins.tool_call_parsers.object_run import ObjectRun

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.parsing import ParserContext

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Machine):
    """Parses the tags. Holds back only text that may become a tag, and whitespace before a tag."""

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._run: ObjectRun | None = None
        self._follows_call = False

    def grammar(self, rule: CallRule) -> Format:
        return marked(rule, _call, OPEN, "\n")

    def start(self) -> bool:
        if self._follows_call:
            self._follows_call = not self.strip_held()
        if self.emit_until(OPEN) is None:
            return False
        self._run = ObjectRun(self, self.take_held(self.held.index(OPEN) + len(OPEN)), "")
        return self.set_state(self._objects)

    def _objects(self) -> bool:
        run = self._run
        if run is None or not run.read():
            return False
        if not run.is_over:
            return True
        return self.set_state(self._tail if run.num_calls else self.start)

    def _tail(self) -> bool:
        """State: drop the text before the closing tag."""
        if self.drop_until(CLOSE) is None:
            return False
        self.take_held(len(CLOSE))
        self._follows_call = True
        return self.set_state(self.start)

    def end(self) -> None:
        if self.read == self._objects and self._run is not None:
            self._run.end()
        elif self.read == self.start:
            self.emit_content(self.held)


def _call(function: Function, arguments: Format) -> Format:
    return tag(f'{OPEN}\n{{"name": "{function.name}", "arguments": ', arguments, f"}}\n{CLOSE}")
