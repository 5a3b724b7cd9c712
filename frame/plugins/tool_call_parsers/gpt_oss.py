"""`gpt-oss`: tool calls in the harmony format: a message of the commentary channel with a function
as its recipient.

Other channels are the reasoning parser's (`gpt-oss`), which passes these messages on as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace

from frame.interfaces.parsing import CallRule, Format, Function
from frame.plugins.tool_call_parsers.formats import marked, tag
from frame.plugins.tool_call_parsers.headed import HeadedCalls

OPEN, CALL, NEXT = "<|channel|>commentary to=functions.", "<|call|>", "<|start|>assistant"


class GptOss(HeadedCalls):
    """Parses harmony calls. `<|call|>` is a stop token that ends the turn, so the text seldom
    contains it."""

    keeps_special_tokens = True
    opening, close, around = OPEN, CALL, (NEXT,)
    header = re.compile(r"(?P<name>[^\s<{]+)\s*(?:(?:<\|constrain\|>)?\s*json)?\s*<\|message\|>\s*")

    def grammar(self, rule: CallRule) -> Format:
        """The format of one call. The stop token at its end ends the turn."""
        return marked(replace(rule, is_parallel=False), _call, OPEN, "")


def _call(function: Function, arguments: Format) -> Format:
    return tag(f"{OPEN}{function.name} <|constrain|>json<|message|>", arguments, "")
