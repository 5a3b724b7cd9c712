"""Turns generated text into OpenAI chat deltas with the configured reasoning and tool-call parsers,
and groups deltas into content blocks.

A content block is one of the Anthropic API and an output item of the Responses API. Also adds to a
request's sampling parameters what the parsers require, and counts the reasoning tokens of a
finished sequence. Used by the chat routes of all APIs. Must not depend on a parser plugin, a route
or the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.http.chat.constraints import ToolUse, replace_constraint, to_format
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.openai.completion_objects import TextLogprobs
from frame.interfaces.parsing import Format, ReasoningDelta, ReasoningParser, ToolCallParser, ToolDelta
from frame.text.tokenizer import Tokenizer

BLOCK = 64  # tokens that are fed at once, to be counted, where all of them are of one kind
PROMPT_END = 32  # last prompt tokens, from which a reasoning parser tells whether thinking is open


class ParserPair:
    """The reasoning and the tool-call parser of one sequence, already started. Either may be None.
    `use` holds the tools of the request; `prompt_end` is the text of the last prompt tokens."""

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

    def constrain_params(self, params: SamplingParams, *, is_whole: bool = False) -> SamplingParams:
        """The parameters with the grammar that reasoning and tool calls require.

        Special tokens stay in the text where a parser needs them. `is_whole`: the grammar of
        `params` describes the whole output, so it is left unchanged. Raises ApiError 400 where
        tool calls have to be enforced and the parser cannot do that.
        """
        if any(parser.keeps_special_tokens for parser in (self.reasoning, self.tools) if parser is not None):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        if is_whole and params.grammar is not None:
            return params
        if self.use is not None and self.use.is_enforced:
            return self._enforce_calls(params)
        content = to_format(params) if self.reasoning is not None else None
        if content is None:
            return params
        whole = self._add_reasoning(content, is_calls=False)
        return params if whole is content else replace_constraint(params, whole)

    def _add_reasoning(self, form: Format, *, is_calls: bool) -> Format:
        """The format of an output whose content, or calls, have the format `form`."""
        return form if self.reasoning is None else self.reasoning.grammar(form, is_calls=is_calls)

    def _enforce_calls(self, params: SamplingParams) -> SamplingParams:
        assert self.use is not None
        rule, content = self.use.rule, to_format(params)
        if rule.is_required or content is not None:
            calls = self.tools and self.tools.grammar(replace(rule, is_required=True))
            if calls:
                calls = self._add_reasoning(calls, is_calls=True)
            if calls and not rule.is_required and content is not None:
                calls = {"type": "or", "elements": [calls, self._add_reasoning(content, is_calls=False)]}
        else:
            calls = self.tools and self.tools.grammar(rule)
        if not calls:
            reason = "this server has no tool-call parser" if self.tools is None else "this server's tool-call parser cannot enforce calls"
            remedy = "use tool_choice auto without strict functions, or start it with another --tool-call-parser"
            raise ApiError(400, f"{reason}; {remedy}", "tool_choice" if rule.is_required else "tools")
        return replace_constraint(params, calls)


def decode_prompt_end(prompt: list[int], tokenizer: Tokenizer | None) -> str:
    """The last `PROMPT_END` prompt tokens as text, with special tokens; "" without a tokenizer."""
    return "" if tokenizer is None else tokenizer.decode(prompt[-PROMPT_END:], False)


class OutputParser:
    """Parses the output of one sequence into chat deltas; joined, they are the message.
    `max_calls`: tool calls after so many are dropped; None: all are returned. `shows_reasoning`:
    reasoning is returned, and not only counted."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, max_calls: int | None = None, shows_reasoning: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._shows_reasoning = shows_reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._content: list[str] = []
        self._reasoning_pieces: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    def ends_in_call(self, finish: Finish | None) -> bool:
        """Whether there are tool calls, of which no stop string cut the last one."""
        return bool(self._calls) and not _is_cut(finish, "".join(self._arguments[max(self._calls)]))

    @property
    def has_reasoning(self) -> bool:
        return bool(self._reasoning_pieces)

    def feed(self, text: str, finish: Finish | None) -> list[dict[str, Any]]:
        """The deltas of a further piece of text. With `finish` the parsers also return the text
        that they held back, but no markup of a tool call that was cut off."""
        is_last = finish is not None
        deltas: list[dict[str, Any]] = []
        for reasoning, content in self._split_reasoning(text, is_last):
            if reasoning:
                self._reasoning_pieces.append(reasoning)
                if self._shows_reasoning:
                    deltas.append({"reasoning_content": reasoning, "reasoning": reasoning})
            self._add_content(content, deltas)
        if finish is not None and self._tools is not None:
            self._add_calls(self._tools.finish() if finish.reason == "stop" else self._tools.finish_cut(), deltas)
        return deltas

    def _split_reasoning(self, text: str, is_last: bool) -> list[tuple[str, str]]:
        if self._reasoning is None:
            return [("", text)]
        splits = [self._reasoning.feed(text), *([self._reasoning.finish()] if is_last else [])]
        return [(split.reasoning, split.content) for split in splits]

    def _add_content(self, content: str, deltas: list[dict[str, Any]]) -> None:
        if not content:
            return
        if self._tools is not None:
            self._add_calls(self._tools.feed(content), deltas)
        else:
            self._content.append(content)
            deltas.append({"content": content})

    def _add_calls(self, delta: ToolDelta, deltas: list[dict[str, Any]]) -> None:
        if delta.content:
            self._content.append(delta.content)
            deltas.append({"content": delta.content})
        for call in delta.calls:
            if self._max_calls is not None and call.index >= self._max_calls:
                continue
            if call.index not in self._calls:
                head = self._calls[call.index] = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "name": call.name or ""}
                self._arguments[call.index] = [call.arguments]
                deltas.append({"tool_calls": [{"index": call.index, **_tool_call(head, call.arguments)}]})
            else:
                self._arguments[call.index].append(call.arguments)
                deltas.append({"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]})

    def build_message(self) -> dict[str, Any]:
        """The whole message in OpenAI's shape, after the last piece was fed."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._reasoning_pieces and self._shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning_pieces)
        if self._calls:
            message["tool_calls"] = [_tool_call(self._calls[index], "".join(self._arguments[index])) for index in sorted(self._calls)]
        return message


def _is_cut(finish: Finish | None, arguments: str) -> bool:
    """Whether a stop string ended the output within the arguments of a tool call."""
    if finish is None or not isinstance(finish.matched, str):
        return False
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return True
    return False


def _tool_call(head: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {"id": head["id"], "type": head["type"], "function": {"name": head["name"], "arguments": arguments}}


class ReasoningTokenCounter:
    """Assigns tokens to reasoning or content by the parser's deltas.

    A token is reasoning if the parser returns reasoning for it. A token without output (a tag, or
    whitespace that is dropped) is of the kind of the tokens before it; at the start of the output
    it is of the kind of the first output.
    """

    def __init__(self) -> None:
        self.count = 0  # reasoning tokens
        self._is_reasoning: bool | None = None  # the kind of the last output; None before any
        self._undecided = 0  # tokens before any output

    def is_plain(self, delta: ReasoningDelta) -> bool:
        """Whether the tokens that gave this delta are all of one kind."""
        if delta.reasoning:
            return not delta.content and self._is_reasoning is not False
        return not delta.content or not self._is_reasoning

    def add_tokens(self, num_tokens: int, delta: ReasoningDelta) -> None:
        """Count tokens of one kind, for which the parser returned `delta`."""
        if delta.reasoning:
            self.count += self._undecided + num_tokens
            self._undecided, self._is_reasoning = 0, not delta.content
        elif delta.content:
            self._undecided, self._is_reasoning = 0, False
        elif self._is_reasoning:
            self.count += num_tokens
        elif self._is_reasoning is None:
            self._undecided += num_tokens


def count_reasoning_tokens(token_ids: Sequence[int], decode: Callable[[list[int]], str], make: Callable[[], ReasoningParser]) -> int:
    """The number of reasoning tokens in `token_ids`. `make` returns a new, started parser.

    Text that is decoded in blocks may differ from the whole text in spaces and in incomplete
    characters. This does not change what a parser finds.
    """
    # `ahead` reads whole blocks; `behind` reads the same text, token by token where a block is
    # mixed.
    counter, ahead, behind = ReasoningTokenCounter(), make(), make()
    for start in range(0, len(token_ids), BLOCK):
        block = list(token_ids[start : start + BLOCK])
        text = decode(block)
        delta = ahead.feed(text)
        if counter.is_plain(delta):
            behind.feed(text)
            counter.add_tokens(len(block), delta)
            continue
        for token in block:
            counter.add_tokens(1, behind.feed(decode([token])))
    counter.add_tokens(0, ahead.finish())
    return counter.count


# content blocks -----------------------------------------------------------------------------------

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class ContentBlock:
    """One content block of a sequence."""

    index: int  # index in the sequence's blocks
    kind: Kind
    name: str = ""  # of the called function
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)  # of its text; of a call: of the JSON arguments
    logprobs: list[Any] = field(default_factory=list)  # of all its tokens, if requested, in JSON
    last_logprobs: list[Any] = field(default_factory=list)  # of the last piece's tokens

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as an object; text that is not one is under `_unparsed`."""
        try:
            arguments = msgspec.json.decode(self.text or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        return arguments if isinstance(arguments, dict) else {"_unparsed": self.text}


class BlockEventWriter:
    """Writes the events of one API for a block that was opened, has a new piece, or was closed;
    this one writes none, for responses that are not streamed."""

    def write_start(self, block: ContentBlock) -> bytes:
        return b""

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        return b""

    def write_stop(self, block: ContentBlock) -> bytes:
        return b""


class ContentBlocks:
    """The content blocks of one sequence.

    Deltas of a stream and the same deltas at once give the same blocks. `logprobs` assigns
    log-probabilities to the pieces; None: they are not requested.
    """

    def __init__(self, logprobs: TextLogprobs | None = None) -> None:
        self._logprobs = logprobs
        self.blocks: list[ContentBlock] = []
        self.open: ContentBlock | None = None  # the last block, until it is closed
        self._call = -1  # index of the open call among the calls

    def feed(self, deltas: Iterable[dict[str, Any]], writer: BlockEventWriter) -> bytes:
        """Add chat deltas, as `OutputParser.feed` returns them; returns their events."""
        events: list[bytes] = []
        for delta in deltas:
            if reasoning := delta.get("reasoning_content"):
                events += self._add_piece("reasoning", reasoning, writer)
            if content := delta.get("content"):
                events += self._add_piece("text", content, writer)
            for call in delta.get("tool_calls") or ():
                events += self._add_call(call, writer)
        return b"".join(events)

    def read(self, sequence: SequenceState, parser: OutputParser | None, writer: BlockEventWriter) -> bytes:
        """Add the new output of a sequence, with `parser` if there is one; returns the events."""
        text, _, logprobs = sequence.take_output()
        if self._logprobs is not None:
            self._logprobs.add(logprobs)
        is_last = sequence.finish is not None
        events = self.feed([{"content": text}] if parser is None else parser.feed(text, sequence.finish), writer)
        return events + self.finish(writer) if is_last else events

    def finish(self, writer: BlockEventWriter) -> bytes:
        """Close the open block, if there is one; returns its event."""
        block, self.open = self.open, None
        return writer.write_stop(block) if block is not None else b""

    def _add_call(self, call: dict[str, Any], writer: BlockEventWriter) -> list[bytes]:
        function, events = call["function"], []
        if self.open is None or self.open.kind != "call" or self._call != call["index"]:
            self._call = call["index"]
            events.append(self._open_block("call", writer, function.get("name") or "", call.get("id") or ""))
        return events + self._add_piece("call", function.get("arguments") or "", writer)

    def _add_piece(self, kind: Kind, piece: str, writer: BlockEventWriter) -> list[bytes]:
        events = []
        if self.open is None or self.open.kind != kind:
            events.append(self._open_block(kind, writer))
        block = self.blocks[-1]
        if piece:
            block.pieces.append(piece)
            if self._logprobs is not None:
                block.last_logprobs = self._logprobs.take_logprobs(piece)
                block.logprobs += block.last_logprobs
            events.append(writer.write_delta(block, piece))
        return events

    def _open_block(self, kind: Kind, writer: BlockEventWriter, name: str = "", call_id: str = "") -> bytes:
        closing = self.finish(writer)
        self.open = ContentBlock(len(self.blocks), kind, name, call_id)
        self.blocks.append(self.open)
        return closing + writer.write_start(self.open)
