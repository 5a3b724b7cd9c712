"""The common part of DeepSeek-V3's and V3.1's tool calls: marks and grammar."""

from __future__ import annotations

from typing import ClassVar

from frame.interfaces.parsing import CallRule, Format, Function
from frame.plugins.tool_call_parsers.formats import arguments_of, several, tag, within_text
from frame.plugins.tool_call_parsers.headed import HeadedCalls

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeek(HeadedCalls):
    """The common base. `before`: text around the name; `after`: after the arguments; `between`:
    between calls."""

    keeps_special_tokens = True
    opening, close, around = BEGIN, END, (ALL_BEGIN, ALL_END)
    before: ClassVar[tuple[str, str]]
    after: ClassVar[str]
    between: ClassVar[str]

    def grammar(self, rule: CallRule) -> Format:
        calls = several([self._call(function, rule) for function in rule.functions], self.between, rule)
        block = tag(ALL_BEGIN, calls, ALL_END)
        return block if rule.is_required else within_text(ALL_BEGIN, [block], rule)

    def _call(self, function: Function, rule: CallRule) -> Format:
        left, right = self.before
        return tag(BEGIN + left + function.name + right, arguments_of(function, rule), self.after)
