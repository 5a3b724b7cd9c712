"""Builds one response of the Responses API while it is generated: the object, its events, its
stored form. Used by the routes of `responses`. Must not depend on a connection."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec

from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import count_reasoning, make_output_parsers
from frame.entrypoints.http.chat.content_blocks import BlockEventWriter, ContentBlocks
from frame.entrypoints.http.failures import failure
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.openai.logprobs import TextLogprobs
from frame.entrypoints.http.openai.response_events import EventWriter, final_event_name
from frame.entrypoints.http.openai.response_store import EventLog
from frame.entrypoints.http.openai.responses_schema import ResponsesRequest
from frame.entrypoints.http.services import Services

_encode = msgspec.json.encode
# Of finish reasons; otherwise "completed"
STATUSES = {"length": "incomplete", "abort": "cancelled", "error": "failed"}


@dataclass(slots=True)
class ResponseInput:
    """The input of one response."""

    request: ResponsesRequest
    tenant: str  # whose key the request has; "" without keys
    history: list[dict[str, Any]]  # stored items before the input
    items: list[dict[str, Any]]  # the input, as it is stored
    conversation: str | None = None  # id of the conversation that the response is added to
    log: EventLog | None = None  # events of a streamed background response


class ResponseBuilder:
    """A response as one object or as events; stored unless the request has `store: false`."""

    def __init__(self, services: Services, response_input: ResponseInput, chat: ChatRequest, state: RequestState) -> None:
        request = response_input.request
        self._store = services.responses
        self._input = response_input
        self._sequence = state.sequences[0]
        self._parser = make_output_parsers(services, chat, state).get(0)
        # Cached, because the last body is made twice: for the store and for the client.
        self._count_reasoning = cache(partial(count_reasoning, services, chat, self._sequence, self._parser))
        self._is_stored = request.store is not False and self._store.is_on
        self._blocks = ContentBlocks(TextLogprobs(services.need_tokenizer()) if request.wants_logprobs else None)
        self._writer = EventWriter(state.rid, request.custom_tools)
        self._name = state.rid
        self._model = services.resolved.served_name
        self._created = int(time.time())
        self._is_started = False

    def build_response(self) -> dict[str, Any]:
        """The whole response, after the sequence has finished."""
        self._blocks.read(self._sequence, self._parser, BlockEventWriter())
        return self._finished()

    def read(self, sequence: SequenceState) -> None:
        """Read new output of a response that is not streamed, so that its log-probabilities are not
        all formatted at its end."""
        if sequence.finish is None:
            self._blocks.read(sequence, self._parser, BlockEventWriter())

    def build_initial(self) -> dict[str, Any]:
        """The response before its first token."""
        return self._body("in_progress")

    def write_events(self, sequence: SequenceState) -> bytes:
        """The events of the new output."""
        events = b""
        if not self._is_started:
            self._is_started = True
            body = self._body("in_progress")
            events = self._writer.write_event("created", response=body) + self._writer.write_event("in_progress", response=body)
        events += self._blocks.read(sequence, self._parser, self._writer)
        if sequence.finish is None:
            return events
        body = self._finished()
        return events + self._writer.write_event(final_event_name(body["status"]), response=body)

    def store(self) -> None:
        """Store the response in its present state."""
        response_input = self._input
        if self._store.is_cancelled(self._name) and self._store.get(self._name, response_input.tenant) is None:
            return  # deleted after the cancellation
        if self._is_stored:
            body = self._body(self._status())
            before = [*response_input.history, *response_input.items]
            items = _encode([*before, *body["output"]])
            self._store.put(self._name, response_input.tenant, _encode(body), items, len(before), response_input.log)

    def delete_unfinished(self) -> None:
        """Delete a response that ended before it finished. The last call for a response."""
        self._store.forget_cancelled(self._name)
        if self._is_stored and (self._sequence.finish is None or not self._is_started):
            self._store.delete(self._name, self._input.tenant)

    def _finished(self) -> dict[str, Any]:
        self._is_started = True
        response_input, status = self._input, self._status()
        if response_input.conversation is not None and status in ("completed", "incomplete"):
            new = [*response_input.items, *self._output(status)]
            if not self._store.append_items(response_input.conversation, response_input.tenant, new):
                # Deleted meanwhile, or full: the response shows no conversation
                response_input.conversation = None
        self.store()
        return self._body(status)

    def _status(self) -> str:
        """The status; a response that finished after its cancellation is cancelled."""
        if self._store.is_cancelled(self._name):
            return "cancelled"
        finish = self._sequence.finish
        return "in_progress" if finish is None else STATUSES.get(finish.reason, "completed")

    def _output(self, status: str) -> list[dict[str, Any]]:
        last = len(self._blocks.blocks) - 1
        return [
            self._writer.make_item(block, "incomplete" if block.index == last and status != "completed" else "completed")
            for block in self._blocks.blocks
        ]

    def _body(self, status: str) -> dict[str, Any]:
        request, finish = self._input.request, self._sequence.finish
        is_over = status != "in_progress"
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": bool(request.background),
            "error": {"code": "server_error", "message": failure(finish).message} if finish and finish.reason == "error" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "conversation": None if self._input.conversation is None else {"id": self._input.conversation},
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self._model,
            "moderation": None,
            "output": self._output(status) if is_over else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_options": None,
            "prompt_cache_retention": request.prompt_cache_retention,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": self._is_stored,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": self._usage() if is_over else None,
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        sequence = self._sequence
        return {
            "input_tokens": len(sequence.prompt),
            "input_tokens_details": {"cached_tokens": sequence.cached, "cache_write_tokens": 0},
            "output_tokens": sequence.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._count_reasoning()},
            "total_tokens": len(sequence.prompt) + sequence.num_tokens,
        }
