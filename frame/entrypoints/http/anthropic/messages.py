"""The routes of the Anthropic API: `/v1/messages` and `/v1/messages/count_tokens`, as chat
requests. Must not depend on the engine."""

from __future__ import annotations

from typing import Any

import msgspec

from frame.core.interfaces.http import HttpExtension
from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.anthropic.messages_schema import CountTokensRequest, MessagesRequest
from frame.entrypoints.http.chat.chat_request import count_chat, make_output_parsers, start_chat
from frame.entrypoints.http.chat.content_blocks import BlockEventWriter, ContentBlock, ContentBlocks
from frame.entrypoints.http.errors import CONTEXT_LENGTH, ApiError, ErrorShape
from frame.entrypoints.http.failures import aborted, failure
from frame.entrypoints.http.openai.completions import models_router
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_starter import stream_response, wait_complete
from frame.entrypoints.http.response_models.anthropic import AnthropicErrorResponse, AnthropicMessage, MessageEvent, MessageTokenCount
from frame.entrypoints.http.services import Services

_encode = msgspec.json.encode

ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
               413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


def _error_body(error: ApiError) -> bytes:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Clients detect the error by these words
    message = f"prompt is too long: {error.message}" if error.code == CONTEXT_LENGTH else error.message
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: " % name.encode() + _encode({"type": name, **fields}) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + _error_body(error) + b"\n\n"


ERRORS = ErrorShape(_error_body, _error_event, b"request-id", model=AnthropicErrorResponse)

router = ApiRouter(access=Access.USER, errors=ERRORS)


@router.post("/v1/messages", responses=responds_with(AnthropicMessage, events=MessageEvent))
async def messages(request: MessagesRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create a message."""
    chat = request.to_chat_request()
    state = await start_chat(context, services, chat, "msg_")
    response = MessageResponse(services, chat, state)
    if not request.stream:
        await wait_complete(state)
        return response.build_message()
    await stream_response(context, services, state, response.write_events, lambda: b"")
    return None


@router.post("/v1/messages/count_tokens", responses=responds_with(MessageTokenCount))
async def count_tokens(request: CountTokensRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Count the prompt tokens of a message."""
    return {"input_tokens": await count_chat(context, services, request.to_chat_request())}


class MessageResponse:
    """A message, whole or as events."""

    def __init__(self, services: Services, request: ChatRequest, state: RequestState) -> None:
        self._name = state.rid
        self._model = services.resolved.served_name
        self._sequence = state.sequences[0]
        self._parser = make_output_parsers(services, request, state).get(0)
        self._blocks = ContentBlocks()
        self._is_started = False

    def build_message(self) -> dict[str, Any]:
        """The message of a finished sequence. Raises ApiError 503 if it was aborted."""
        self._blocks.read(self._sequence, self._parser, BlockEventWriter())
        finish = self._sequence.finish
        if finish is not None and finish.reason == "abort":
            raise aborted()
        content = [_content(block) for block in self._blocks.blocks]
        return {**self._head(content), **self._stop(finish), "usage": self._usage(self._sequence.num_tokens)}

    def write_events(self, sequence: SequenceState) -> bytes:
        """The events of the new output."""
        finish = sequence.finish
        if finish is not None and finish.reason in ("error", "abort"):
            return _error_event(failure(finish, sequence.request.sent_name) if finish.reason == "error" else aborted())
        events = b"" if self._is_started else self._opening()
        events += self._blocks.read(sequence, self._parser, EventWriter())
        return events + self._closing(finish) if finish is not None else events

    def _opening(self) -> bytes:
        self._is_started = True
        empty = {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return _event("message_start", message=empty) + _event("ping")

    def _closing(self, finish: Finish) -> bytes:
        usage = self._usage(self._sequence.num_tokens)
        return _event("message_delta", delta=self._stop(finish), usage=usage) + _event("message_stop")

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._name, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _stop(self, finish: Finish | None) -> dict[str, Any]:
        matched = finish.matched if finish is not None else None
        if finish is not None and finish.reason == "length":
            reason = "max_tokens"
        elif self._parser is not None and self._parser.ends_in_call(finish):
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(matched, str) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}

    def _usage(self, num_tokens: int) -> dict[str, int]:
        """Anthropic's usage object. `input_tokens` excludes tokens from the prefix cache."""
        cached = self._sequence.cached
        return {
            "input_tokens": len(self._sequence.prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": num_tokens,
        }


class EventWriter(BlockEventWriter):
    """Writes content blocks as Anthropic's events."""

    def write_start(self, block: ContentBlock) -> bytes:
        return _event("content_block_start", index=block.index, content_block=_empty(block))

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        kind, name = DELTAS[block.kind]
        return _event("content_block_delta", index=block.index, delta={"type": kind, name: piece})

    def write_stop(self, block: ContentBlock) -> bytes:
        return _event("content_block_stop", index=block.index)


DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json")}


def _empty(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{block.call_id.removeprefix('call_')}", "name": block.name, "input": {}}
    return {"type": "text", "text": ""} if block.kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}


def _content(block: ContentBlock) -> dict[str, Any]:
    content = _empty(block)
    if block.kind == "call":
        content["input"] = arguments_of(block.text)
    else:
        content["text" if block.kind == "text" else "thinking"] = block.text
    return content


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as an object; text that is not one is under `_unparsed`."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"_unparsed": text}


class AnthropicRoutes(HttpExtension):
    """The HTTP extension `anthropic`. Its clients list models with the route of OpenAI."""

    def make_routers(self) -> tuple[ApiRouter, ...]:
        return (router, models_router)
