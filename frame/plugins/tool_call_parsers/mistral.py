"""`mistral`: tool calls of Mistral's models: `[TOOL_CALLS]name[ARGS]{…}`, or the older
`[TOOL_CALLS] [{"name": …, "arguments": …}, …]`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from frame.core.interfaces.parsing import CallRule, Format, Function
from frame.plugins.tool_call_parsers.formats import marked, tag
from frame.plugins.tool_call_parsers.headed import HeadedCalls
from frame.plugins.tool_call_parsers.object_run import ObjectRun

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.parsing import ParserContext

OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class Mistral(HeadedCalls):
    """Parses both formats; constrained calls use the newer one."""

    keeps_special_tokens = True
    opening = OPEN
    header = re.compile(r"\s*(?P<name>[^\s\[\]{]+)\s*(?:\[CALL_ID\][^\s\[\]{]*\s*)?(?:\[ARGS\])?\s*")

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._run: ObjectRun | None = None

    def grammar(self, rule: CallRule) -> Format:
        return marked(rule, _call, OPEN, "")

    def reject(self, begin: int, brace: int) -> bool:
        if brace < 0 or self.held[begin:brace].strip() != "[":
            return super().reject(begin, brace)
        self._run = ObjectRun(self, self.take_held(brace), ",")
        return self.set_state(self._list)

    def _list(self) -> bool:
        run = self._run
        if run is None or not run.read():
            return False
        if not run.is_over:
            return True
        if run.num_calls:
            self.take_held(self.held.startswith("]"))
            self.follows_call = True
        return self.set_state(self.start)

    def end(self) -> None:
        if self.read == self._list and self._run is not None:
            self._run.end()
        else:
            super().end()


def _call(function: Function, arguments: Format) -> Format:
    return tag(f"{OPEN}{function.name}{ARGUMENTS}", arguments, "")
