"""An answer as a row of blocks (thinking, text, tool calls), of which one is open at a time: Anthropic's content, the items of Responses.

Fed with chat deltas, whole or in pieces: both give the same blocks. Knows no dialect; a `BlockWriter` says it in its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from frame.entrypoints.engine_client.response_state import SequenceState
    from frame.entrypoints.http.chat.answer_parsing import AnswerParser
    from frame.entrypoints.http.openai.logprobs import TextLogprobs

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """`place` in the row; `name` and `call_id` of a call, whose pieces are its arguments as JSON text. `logprobs` of all its tokens, and
    of those of the last piece, where they were asked for."""

    place: int
    kind: Kind
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last_logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockWriter(Protocol):
    """The events of a dialect."""

    def opened(self, block: Block) -> bytes: ...

    def grown(self, block: Block, piece: str) -> bytes: ...

    def closed(self, block: Block) -> bytes: ...


class Blocks:
    """One a sequence. `logprobs`: assigns log-probabilities to the pieces, where they were asked for."""

    def __init__(self, logprobs: TextLogprobs | None = None) -> None:
        self._logprobs = logprobs
        self.row: list[Block] = []
        self.open: Block | None = None  # the last of the row, until it is closed
        self._call = -1  # the open call's number among the calls

    @property
    def calls_tools(self) -> bool:
        return any(block.kind == "call" for block in self.row)

    def feed(self, deltas: Iterable[dict[str, Any]], writer: BlockWriter) -> bytes:
        """Take in chat deltas (`AnswerParser`'s); returns the events of what is new."""
        events: list[bytes] = []
        for delta in deltas:
            if thought := delta.get("reasoning_content"):
                events += self._grow("reasoning", thought, writer)
            if content := delta.get("content"):
                events += self._grow("text", content, writer)
            for call in delta.get("tool_calls") or ():
                events += self._take_call(call, writer)
        return b"".join(events)

    def read(self, sequence: SequenceState, parser: AnswerParser | None, writer: BlockWriter) -> bytes:
        """Take in what is new of a sequence; returns its events."""
        text, _, parts = sequence.take()
        if self._logprobs is not None:
            self._logprobs.add(parts)
        is_last = sequence.finish is not None
        events = self.feed([{"content": text}] if parser is None else parser.feed(text, sequence.finish), writer)
        return events + self.finish(writer) if is_last else events

    def finish(self, writer: BlockWriter) -> bytes:
        """Close what is open."""
        block, self.open = self.open, None
        return writer.closed(block) if block is not None else b""

    def _take_call(self, call: dict[str, Any], writer: BlockWriter) -> list[bytes]:
        function, events = call["function"], []
        if self.open is None or self.open.kind != "call" or self._call != call["index"]:
            self._call = call["index"]
            events.append(self._start("call", writer, function.get("name") or "", call.get("id") or ""))
        return events + self._grow("call", function.get("arguments") or "", writer)

    def _grow(self, kind: Kind, piece: str, writer: BlockWriter) -> list[bytes]:
        events = []
        if self.open is None or self.open.kind != kind:
            events.append(self._start(kind, writer))
        block = self.row[-1]
        if piece:
            block.pieces.append(piece)
            if self._logprobs is not None:
                block.last_logprobs = self._logprobs.take_logprobs(piece)
                block.logprobs += block.last_logprobs
            events.append(writer.grown(block, piece))
        return events

    def _start(self, kind: Kind, writer: BlockWriter, name: str = "", call_id: str = "") -> bytes:
        closing = self.finish(writer)
        self.open = Block(len(self.row), kind, name, call_id)
        self.row.append(self.open)
        return closing + writer.opened(self.open)


class Silent:
    """For answers that are sent whole."""

    def opened(self, block: Block) -> bytes:
        return b""

    def grown(self, block: Block, piece: str) -> bytes:
        return b""

    def closed(self, block: Block) -> bytes:
        return b""
