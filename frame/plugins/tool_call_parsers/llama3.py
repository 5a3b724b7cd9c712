"""`llama3`: tool calls of Llama 3.1 to 3.3: the output is `{"name": …, "parameters": {…}}`, perhaps
after `<|python_tag|>`; several are separated by semicolons.

An answer that is another JSON object, or names no function that was offered, is text.
"""

from __future__ import annotations

from frame.interfaces.parsing import CallRule, Format, Function, ToolDelta
from frame.plugins.tool_call_parsers.formats import arguments_of, either, sequence, several, tag, text
from frame.plugins.tool_call_parsers.object_run import ObjectCalls

TAG = "<|python_tag|>"
SEPARATORS = ";,"  # between calls


class Llama3(ObjectCalls):
    """Objects are calls only at the start of the output and after the tag."""

    keeps_special_tokens = True

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
            return self.begin_objects(self.take_held(len(self.held) - len(stripped)), SEPARATORS, self.names)
        return self.set_state(self._text)

    def _text(self) -> bool:
        if self.emit_until(TAG) is None:
            return False
        return self.begin_objects(self.take_held(self.held.index(TAG) + len(TAG)), SEPARATORS, self.names)

    def end_objects(self, num_calls: int) -> bool:
        self.follows_call = num_calls > 0
        return self.set_state(self._text)

    def finish_cut(self) -> ToolDelta:
        if self.read == self.read_objects and self.run is not None and not self.run.may_be_call:
            self.run.end()  # content in JSON
        return super().finish_cut()
