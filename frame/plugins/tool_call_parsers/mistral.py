"""`mistral`: tool calls of Mistral's models: `[TOOL_CALLS]name[ARGS]{…}`, or the older
`[TOOL_CALLS] [{"name": …, "arguments": …}, …]`."""

from __future__ import annotations

import re

from frame.interfaces.parsing import CallRule, Format, Function
from frame.plugins.tool_call_parsers.formats import marked, tag
from frame.plugins.tool_call_parsers.headed import HeadedCalls
from frame.plugins.tool_call_parsers.object_run import ObjectCalls

OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class Mistral(ObjectCalls, HeadedCalls):
    """Parses both formats; constrained calls use the newer one."""

    keeps_special_tokens = True
    opening = OPEN
    header = re.compile(r"\s*(?P<name>[^\s\[\]{]+)\s*(?:\[CALL_ID\][^\s\[\]{]*\s*)?(?:\[ARGS\])?\s*")

    def grammar(self, rule: CallRule) -> Format:
        return marked(rule, _call, OPEN, "")

    def reject(self, begin: int, brace: int) -> bool:
        if brace < 0 or self.held[begin:brace].strip() != "[":
            return super().reject(begin, brace)
        return self.begin_objects(self.take_held(brace), ",")

    def end_objects(self, num_calls: int) -> bool:
        if num_calls:
            self.take_held(self.held.startswith("]"))
            self.follows_call = True
        return self.set_state(self.start)


def _call(function: Function, arguments: Format) -> Format:
    return tag(f"{OPEN}{function.name}{ARGUMENTS}", arguments, "")
