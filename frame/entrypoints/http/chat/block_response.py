"""`BlockResponse`: a chat response of one sequence as content blocks. Used by the dialects whose
responses have blocks. Must not know a dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import make_output_parsers
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlocks
from frame.entrypoints.http.failures import aborted
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.request_context import EVENT_STREAM, RequestContext
from frame.entrypoints.http.request_starter import stream_response, wait_complete
from frame.entrypoints.http.services import Services


class BlockResponse(ABC):
    """A subclass writes the blocks, whole or as events."""

    media_type: ClassVar[bytes] = EVENT_STREAM

    def __init__(self, services: Services, request: ChatRequest, state: RequestState) -> None:
        self._services, self._state = services, state
        self._name = state.rid
        self._sequence = state.sequences[0]
        self._parser = make_output_parsers(services, request, state).get(0)
        self._blocks = ContentBlocks()
        self._is_started = False

    @abstractmethod
    def write_events(self, sequence: SequenceState) -> bytes:
        """The events of the new output."""

    @abstractmethod
    def _build(self, finish: Finish | None) -> dict[str, Any]:
        """The response, with all blocks."""

    async def send(self, context: RequestContext, is_streamed: bool | None) -> dict[str, Any] | None:
        """The complete response; None where it was streamed. Raises ApiError, DisconnectedError."""
        if is_streamed:
            await stream_response(context, self._services, self._state, self.write_events, bytes, self.media_type)
            return None
        await wait_complete(self._state)
        self._blocks.read(self._sequence, self._parser, BlockEventWriter())
        finish = self._sequence.finish
        if finish is not None and finish.reason == "abort":
            raise aborted()
        return self._build(finish)
