"""`BlockResponse`: a chat response of one sequence as content blocks. Used by the dialects whose
responses have blocks. Must not know a dialect."""

from __future__ import annotations

from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.http.chat.chat_request import make_output_parsers
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock, ContentBlocks
from frame.entrypoints.http.failures import aborted
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.services import Services


class BlockResponse:
    """A subclass writes the blocks, whole or as events."""

    def __init__(self, services: Services, request: ChatRequest, state: RequestState) -> None:
        self._name = state.rid
        self._sequence = state.sequences[0]
        self._parser = make_output_parsers(services, request, state).get(0)
        self._blocks = ContentBlocks()
        self._is_started = False

    def _read_blocks(self) -> tuple[list[ContentBlock], Finish | None]:
        """The blocks of a finished sequence, and its end. Raises ApiError 503 if it was aborted."""
        self._blocks.read(self._sequence, self._parser, BlockEventWriter())
        finish = self._sequence.finish
        if finish is not None and finish.reason == "abort":
            raise aborted()
        return self._blocks.blocks, finish
