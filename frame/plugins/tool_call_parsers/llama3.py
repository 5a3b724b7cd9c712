"""`llama3`: tool calls of Llama 3.1 to 3.3: the output is `{"name": …, "parameters": {…}}`, perhaps
after `<|python_tag|>`; several are separated by semicolons.

An answer that is another JSON object, or names no function that was offered, is text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.parsing import CallRule, Format, Function, ToolDelta
from frame.plugins.tool_call_parsers.formats import arguments_of, either, sequence, several, tag, text
from frame.plugins.tool_call_parsers.machine import Machine
from frame.plugins.tool_call_parsers.object_run import ObjectRun

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.parsing import ParserContext

TAG = "<|python_tag|>"


class Llama3(Machine):
    """Objects are calls only at the start of the output and after the tag."""

    keeps_special_tokens = True

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._run: ObjectRun | None = None
        self._follows_call = False

    def grammar(self, rule: CallRule) -> Format:
        calls = several([self._call(function, rule) for function in rule.functions], "; ", rule)
        if rule.is_required:
            return calls
        plain: Format = {"type": "regex", "pattern": r"([^{<][\s\S]*)?"}
        return either([calls, sequence(text(TAG), calls), plain])

    @staticmethod
    def _call(function: Function, rule: CallRule) -> Format:
        return tag(f'{{"name": "{function.name}", "parameters": ', arguments_of(function, rule), "}")

    def start(self) -> bool:
        stripped = self.held.lstrip()
        if not stripped or (TAG.startswith(stripped) and stripped != TAG):
            return False
        if stripped[0] == "{":
            return self._begin_run(self.take_held(len(self.held) - len(stripped)))
        return self.set_state(self._text)

    def _text(self) -> bool:
        if self._follows_call:
            self._follows_call = not self.strip_held()
        if self.emit_until(TAG) is None:
            return False
        return self._begin_run(self.take_held(self.held.index(TAG) + len(TAG)))

    def _begin_run(self, lead: str) -> bool:
        self._run = ObjectRun(self, lead, ";,", self.names)
        return self.set_state(self._objects)

    def _objects(self) -> bool:
        run = self._run
        if run is None or not run.read():
            return False
        if not run.is_over:
            return True
        self._follows_call = run.num_calls > 0
        return self.set_state(self._text)

    def finish_cut(self) -> ToolDelta:
        if self.read == self._objects and self._run is not None and not self._run.may_be_call:
            self._run.end()  # content in JSON
        return super().finish_cut()

    def end(self) -> None:
        if self.read == self._objects and self._run is not None:
            self._run.end()
        else:
            self.emit_content(self.held)
