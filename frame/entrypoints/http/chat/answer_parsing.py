"""An answer's text as chat deltas: thinking and tool calls are separated by the configured parsers, the rest is content; and what these
parsers want of a request before it starts.

Knows the shape of OpenAI deltas and no parser by name.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from frame.entrypoints.http.chat.structured import constrained_by, format_of
from frame.entrypoints.http.errors import ApiError

if TYPE_CHECKING:
    from frame.core.interfaces.parsing import Format, ReasoningParser, ToolCallParser, ToolDelta
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.messages import Finish
    from frame.core.text.tokenizer import Tokenizer
    from frame.entrypoints.http.chat.tools import ToolUse

PROMPT_END = 32  # tokens at the prompt's end that tell a parser where the answer begins


class ParserPair:
    """The parsers of one sequence, already told what they have to know. Either may be missing."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, use: ToolUse | None, prompt_end: str, may_think: bool = True
    ) -> None:
        self.reasoning = reasoning
        self.tools = tools
        self.use = use
        if reasoning is not None:
            reasoning.begin(prompt_end, may_think)
        if tools is not None and use is not None:
            tools.begin(use.rule.functions)

    def refined(self, params: SamplingParams, *, is_whole: bool = False) -> SamplingParams:
        """The parameters with the grammar that thinking and calls need, and with special tokens kept where they are marks. With `is_whole`
        the grammar that they have is that of the whole output, and stays. Raises ApiError when calls are to be enforced and cannot be."""
        if any(parser.keeps_special_tokens for parser in (self.reasoning, self.tools) if parser is not None):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        if is_whole and params.grammar is not None:
            return params
        if self.use is not None and self.use.is_enforced:
            return self._with_calls(params)
        form = format_of(params) if self.reasoning is not None else None
        if form is None:
            return params
        whole = self._whole(form, is_calls=False)
        return params if whole is form else constrained_by(params, whole)

    def _whole(self, form: Format, *, is_calls: bool) -> Format:
        """The format of the output whose answer or calls have this form."""
        return form if self.reasoning is None else self.reasoning.grammar(form, is_calls=is_calls)

    def _with_calls(self, params: SamplingParams) -> SamplingParams:
        assert self.use is not None
        rule, answer = self.use.rule, format_of(params)
        if rule.is_required or answer is not None:
            calls = self.tools and self.tools.grammar(replace(rule, is_required=True))
            if calls:
                calls = self._whole(calls, is_calls=True)
            if calls and not rule.is_required and answer is not None:
                calls = {"type": "or", "elements": [calls, self._whole(answer, is_calls=False)]}
        else:
            calls = self.tools and self.tools.grammar(rule)
        if not calls:
            reason = "this server has no tool-call parser" if self.tools is None else "this server's tool-call parser cannot enforce calls"
            remedy = "use tool_choice auto without strict functions, or start it with another --tool-call-parser"
            raise ApiError(400, f"{reason}; {remedy}", "tool_choice" if rule.is_required else "tools")
        return constrained_by(params, calls)


def prompt_end(prompt: list[int], tokenizer: Tokenizer | None) -> str:
    """The end of a prompt as text, special tokens included."""
    return "" if tokenizer is None else tokenizer.decode(prompt[-PROMPT_END:], False)


class AnswerParser:
    """One a sequence. `deltas` of all pieces, joined, are the message that `message` returns. At most `max_calls` calls are passed on."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, max_calls: int | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def has_thoughts(self) -> bool:
        return bool(self._thoughts)

    def feed(self, text: str, finish: Finish | None) -> list[dict[str, Any]]:
        """The deltas that a piece of text adds; with `finish` also what was held back, but no markup of a call that was cut off."""
        is_last = finish is not None
        deltas: list[dict[str, Any]] = []
        for thought, content in self._think(text, is_last):
            if thought:
                self._thoughts.append(thought)
                deltas.append({"reasoning_content": thought, "reasoning": thought})
            self._speak(content, deltas)
        if finish is not None and self._tools is not None:
            self._take_calls(self._tools.finish() if finish.reason == "stop" else self._tools.finish_cut(), deltas)
        return deltas

    def _think(self, text: str, is_last: bool) -> list[tuple[str, str]]:
        if self._reasoning is None:
            return [("", text)]
        parts = [self._reasoning.feed(text), *([self._reasoning.finish()] if is_last else [])]
        return [(part.reasoning, part.content) for part in parts]

    def _speak(self, content: str, deltas: list[dict[str, Any]]) -> None:
        if not content:
            return
        if self._tools is not None:
            self._take_calls(self._tools.feed(content), deltas)
        else:
            self._content.append(content)
            deltas.append({"content": content})

    def _take_calls(self, found: ToolDelta, deltas: list[dict[str, Any]]) -> None:
        if found.content:
            self._content.append(found.content)
            deltas.append({"content": found.content})
        for call in found.calls:
            if self._max_calls is not None and call.index >= self._max_calls:
                continue
            if call.index not in self._calls:
                head = self._calls[call.index] = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "name": call.name or ""}
                self._arguments[call.index] = [call.arguments]
                deltas.append({"tool_calls": [{"index": call.index, **_call(head, call.arguments)}]})
            else:
                self._arguments[call.index].append(call.arguments)
                deltas.append({"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]})

    def message(self) -> dict[str, Any]:
        """The whole message, once the last piece was fed."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._thoughts:
            message["reasoning_content"] = message["reasoning"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [_call(self._calls[index], "".join(self._arguments[index])) for index in sorted(self._calls)]
        return message


def _call(head: dict[str, Any], arguments: str) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    return {"id": head["id"], "type": head["type"], "function": {"name": head["name"], "arguments": arguments}}
