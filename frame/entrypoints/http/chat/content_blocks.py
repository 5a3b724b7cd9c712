"""Groups chat deltas into content blocks (reasoning, text, tool calls), one open at a time.

A block is a content block of the Anthropic API and an output item of the Responses API. Used by
these APIs and Ollama's; a `BlockEventWriter` writes each API's events. Must not depend on an API's
shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.http.chat.output_parser import OutputParser
from frame.entrypoints.http.openai.completion_objects import TextLogprobs

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
        text, _, parts = sequence.take_output()
        if self._logprobs is not None:
            self._logprobs.add(parts)
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
