"""The Anthropic API: `/v1/messages` and `/v1/messages/count_tokens`, as chat requests.

A field that cannot be served raises ApiError 400 with its name. Must not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NotRequired

import msgspec
from pydantic import Field

from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.block_response import BlockResponse
from frame.entrypoints.http.chat.chat_request import count_chat, start_chat
from frame.entrypoints.http.chat.media_parts import check_url, from_base64
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock
from frame.entrypoints.http.chat.request_fields import ExtensionFields, check_num_messages, check_object, check_string, to_content_parts
from frame.entrypoints.http.chat.thinking_fields import ThinkingBudget, check_effort
from frame.entrypoints.http.dialects.anthropic_tools import edit_history, list_hosted, to_chat_tools
from frame.entrypoints.http.errors import CONTEXT_LENGTH, ApiError, ErrorShape, quoted
from frame.entrypoints.http.failures import aborted, failure
from frame.entrypoints.http.openai.completions import models_router
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.protocol.sessions import join_controls
from frame.entrypoints.http.request_body import Metadata
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.media.media_service import MediaPart

# requests -----------------------------------------------------------------------------------------

# The fields of messages, content parts and tools; see `request_fields`.
SOURCE = Shape("type data media_type url file_id content")
BLOCK = Shape(
    "type text cache_control citations title context id name input tool_use_id is_error thinking signature data caller file_id url"
    " tool_name page_age encrypted_content retrieved_at server_name toolset_id",
    {"source": SOURCE},
)
BLOCK.nested["content"] = BLOCK  # of a tool's result
BLOCK.names |= {"content"}
MESSAGES: Mapping[str, Shape] = {
    "messages": Shape("role id type model stop_reason stop_sequence stop_details usage container context_management", {"content": BLOCK}),
    "system": BLOCK,
    "tools": Shape(
        "type name description input_schema cache_control strict eager_input_streaming defer_loading allowed_callers input_examples"
        " mcp_server_name default_config configs max_content_tokens citations model max_uses allowed_domains"
        " blocked_domains user_location display_width_px display_height_px display_number max_characters"
    ),
    "tool_choice": Shape("type name disable_parallel_tool_use"),
    "thinking": Shape("type budget_tokens", unused="display"),
    "output_config": Shape("effort", {"format": Shape("type schema name")}, unused="task_budget"),
}


class MessagesChat(ChatRequest):
    """A chat request made from a message request: errors name the fields of the latter."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}
    TOOL_PLACES: ClassVar[Mapping[str, str]] = {".function.parameters": ".input_schema", ".function": ""}

    budget_tokens: int | None = None  # of `thinking`, which clients send to every model

    def find_budget(self) -> ThinkingBudget | None:
        if (budget := super().find_budget()) is not None or self.budget_tokens is None:
            return budget
        return ThinkingBudget("thinking.budget_tokens", self.budget_tokens, is_required=False)


class CountTokensRequest(ExtensionFields):
    """A request to count the prompt tokens of a message: the fields that the prompt depends on."""

    NESTED: ClassVar[Mapping[str, Shape]] = MESSAGES

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None

    def to_chat_request(self, **more: Any) -> ChatRequest:
        """The chat request of this request; `more` adds fields. Raises ApiError 400."""
        check_num_messages(self.messages, "messages", others=bool(self.system))
        fields = {**self.extension_fields(), **more}
        fields.pop("thinking", None)  # below
        fields["cache_control"] = join_controls(self._list_parts(), self.cache_control)
        fields["budget_tokens"] = (self.thinking or {}).get("budget_tokens")
        fields |= to_chat_tools(self.tools or [], self.tool_choice) | _format(self.output_config)
        if self.messages and self.messages[-1].get("role") == "assistant":
            fields["continue_final_message"] = True  # the response continues this message
        if arguments := self._thinking_arguments() | (self.chat_template_kwargs or {}):
            fields["chat_template_kwargs"] = arguments
        return MessagesChat(model=self.model, messages=self._conversation(), **fields)

    def _list_parts(self) -> list[tuple[str, dict[str, Any]]]:
        """The parts of the request that may have a `cache_control`, by their paths."""
        contents = [("tools", self.tools), ("system", self.system)]
        contents += [(f"messages[{place}].content", message.get("content")) for place, message in enumerate(self.messages)]
        return [
            (f"{where}[{place}]", part)
            for where, parts in contents
            for place, part in enumerate(parts if isinstance(parts, list) else ())
            if isinstance(part, dict)
        ]

    def ignored_parts(self) -> tuple[str, ...]:
        """The paths of what is left out: tools that this server does not run, and edits that only
        shorten the prompt. Raises ApiError 400."""
        servers = ["mcp_servers"] if self.mcp_servers else []
        return (*servers, *list_hosted(self.tools or ()), *edit_history([], self.context_management)[1])

    def _thinking_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template for `thinking`, by both names that templates use, and for
        `output_config.effort`. Raises ApiError 400."""
        arguments: dict[str, Any] = {}
        if (effort := (self.output_config or {}).get("effort")) is not None:
            arguments["reasoning_effort"] = check_effort(effort, "output_config.effort")
        if self.thinking is not None:
            arguments["enable_thinking"] = arguments["thinking"] = _is_thinking(self.thinking)
        return arguments

    def _conversation(self) -> list[dict[str, Any]]:
        system = "\n".join(_text(part, "system") for part in to_content_parts(self.system, "system"))
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for i, message in enumerate(edit_history(self.messages, self.context_management)[0]):
            place = f"messages[{i}]"
            role, parts = message.get("role"), to_content_parts(message.get("content"), f"{place}.content")
            if role == "assistant":
                messages.append(_assistant(parts, place))
            elif role in ("user", "system"):
                messages += _turn(role, parts, place)
            else:
                raise ApiError(400, f"{place}.role is {quoted(role)}; it must be user, assistant or system", f"{place}.role")
        return messages


class MessagesRequest(CountTokensRequest):
    """A request to create a message."""

    max_tokens: int
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None

    def to_chat_request(self, **more: Any) -> ChatRequest:
        return super().to_chat_request(
            max_tokens=self.max_tokens, stream=self.stream, temperature=self.temperature, top_p=self.top_p, stop=self.stop_sequences, **more
        )


def _assistant(parts: list[dict[str, Any]], place: str) -> dict[str, Any]:
    """A message of the assistant: text, reasoning and tool calls."""
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for i, part in enumerate(parts):
        here = f"{place}.content[{i}]"
        if part["type"] == "thinking":
            thoughts.append(check_string(part.get("thinking"), f"{here}.thinking"))
        elif part["type"] == "tool_use":
            function = {
                "name": check_string(part.get("name"), f"{here}.name"),
                "arguments": check_object(part.get("input"), f"{here}.input"),
            }
            calls.append({"id": check_string(part.get("id"), f"{here}.id"), "type": "function", "function": function})
        elif part["type"] != "redacted_thinking":
            texts.append(_text(part, here))
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _turn(role: str, parts: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """A user turn as chat messages: each tool result becomes a message."""
    messages: list[dict[str, Any]] = []
    rest: list[tuple[dict[str, Any], str]] = []
    for i, part in enumerate(parts):
        here = f"{place}.content[{i}]"
        if part["type"] == "tool_result":
            results = to_content_parts(part.get("content"), f"{here}.content")
            content = _join([(result, f"{here}.content[{j}]") for j, result in enumerate(results)], "")
            messages.append(
                {"role": "tool", "tool_call_id": check_string(part.get("tool_use_id"), f"{here}.tool_use_id"), "content": content}
            )
        else:
            rest.append((part, here))
    if rest or not messages:
        messages.append({"role": role, "content": _join(rest, "\n")})
    return messages


def _join(parts: list[tuple[dict[str, Any], str]], between: str) -> str | list[Any]:
    """The text of parts with their places, joined, or the parts of a content with an image."""
    media = {place: _image(part, place) for part, place in parts if part["type"] == "image"}
    if not media:
        return between.join(_text(part, place) for part, place in parts)
    return [media[place] if place in media else {"type": "text", "text": _text(part, place)} for part, place in parts]


def _image(part: dict[str, Any], place: str) -> MediaPart:
    source, here = check_object(part.get("source"), f"{place}.source"), f"{place}.source"
    kind = source.get("type")
    if kind == "base64":
        return MediaPart("image", from_base64(source.get("data"), f"{here}.data"), f"{here}.data")
    if kind == "url":
        return MediaPart("image", check_url(source.get("url"), f"{here}.url"), f"{here}.url")
    raise ApiError(400, f"{here}.type is {quoted(kind)}; it must be base64 or url", f"{here}.type")


def _text(part: dict[str, Any], place: str) -> str:
    source = part.get("source")
    if part["type"] == "document" and isinstance(source, dict) and source.get("type") == "text":
        return check_string(source.get("data"), f"{place}.source.data")
    if part["type"] == "document":
        sentence = (
            f"{place} is a document that is no plain text, such as a PDF, which is not supported; send its text, or its pages as images"
        )
        raise ApiError(400, sentence, place)
    if part["type"] != "text":
        raise ApiError(400, f"{place}: this server takes text and images of users here, not {quoted(part['type'])}", place)
    return check_string(part.get("text"), f"{place}.text")


def _is_thinking(thinking: dict[str, Any]) -> bool:
    """Whether the model is to think."""
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise ApiError(400, f"thinking.type is {quoted(kind)}; it must be enabled, adaptive or disabled", "thinking.type")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise ApiError(400, f"thinking.budget_tokens is {quoted(budget)}; it must be a whole number from 1", "thinking.budget_tokens")
    return bool(kind != "disabled")


def _format(config: dict[str, Any] | None) -> dict[str, Any]:
    if (form := (config or {}).get("format")) is None:
        return {}
    form = check_object(form, "output_config.format")
    if form.get("type") != "json_schema":
        raise ApiError(400, f"output_config.format.type is {quoted(form.get('type'))}; it must be json_schema", "output_config")
    schema = check_object(form.get("schema"), "output_config.format.schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


# responses ----------------------------------------------------------------------------------------

AnthropicErrorDetail = declare("AnthropicErrorDetail", "type message")
AnthropicErrorResponse = declare(
    "AnthropicErrorResponse", doc="The error body of the Anthropic API.", type="error", error=AnthropicErrorDetail
)
TextBlock = declare("TextBlock", "text", type="text")
ThinkingBlock = declare("ThinkingBlock", "thinking signature", type="thinking")
ToolUseBlock = declare("ToolUseBlock", "id name", type="tool_use", input=dict[str, Any])
Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
MessageUsage = declare(
    "MessageUsage",
    "input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens",
    "`input_tokens` excludes the other two. `cache_creation_input_tokens`: prompt tokens that a session keeps and that were computed.",
)
AnthropicMessage = declare(
    "AnthropicMessage",
    "id model stop_sequence",
    type="message",
    role="assistant",
    content=array(Block),
    stop_reason=StopReason | None,
    usage=MessageUsage,
)
MessageDelta = declare(
    "MessageDelta",
    "text? thinking? partial_json? stop_sequence?",
    "The delta of `content_block_delta` (with `type`), or of `message_delta`.",
    type=NotRequired[Literal["text_delta", "thinking_delta", "input_json_delta"]],
    stop_reason=NotRequired[StopReason],
)
EventName = Literal["message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
                    "message_stop", "error"]  # fmt: skip
MessageEvent = declare(
    "MessageEvent",
    "index?",
    "An event of a streamed message. `type` says which fields it has.",
    type=EventName,
    message=NotRequired[AnthropicMessage],
    content_block=NotRequired[Block],
    delta=NotRequired[MessageDelta],
    usage=NotRequired[MessageUsage],
    error=NotRequired[AnthropicErrorDetail],
)
MessageTokenCount = declare("MessageTokenCount", "input_tokens")


_encode = msgspec.json.encode

ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
               413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


PROMPT_TOO_LONG, MAX_TOKENS_TOO_LARGE = "prompt is too long", "input length and `max_tokens` exceed context limit"


def _error_body(error: ApiError) -> bytes:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == CONTEXT_LENGTH:  # clients detect the error by these words
        message = f"{MAX_TOKENS_TOO_LARGE if error.param == 'max_tokens' else PROMPT_TOO_LONG}: {message}"
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
    context.ignored += request.ignored_parts()
    state = await start_chat(context, services, chat, "msg_")
    return await MessageResponse(services, chat, state).send(context, request.stream)


@router.post("/v1/messages/count_tokens", responses=responds_with(MessageTokenCount))
async def count_tokens(request: CountTokensRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Count the prompt tokens of a message."""
    chat = request.to_chat_request()
    context.ignored += request.ignored_parts()
    return {"input_tokens": await count_chat(context, services, chat)}


class MessageResponse(BlockResponse):
    """A message, whole or as events."""

    def __init__(self, services: Services, request: ChatRequest, state: RequestState) -> None:
        super().__init__(services, request, state)
        self._model = services.response_model(request.model)

    def _build(self, finish: Finish | None) -> dict[str, Any]:
        content = [_content(block) for block in self._blocks.blocks]
        return {**self._head(content), **self._stop(finish), "usage": self._usage(self._sequence.num_tokens)}

    def write_events(self, sequence: SequenceState) -> bytes:
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
        cached, written = self._sequence.cached, self._sequence.num_written
        return {
            "input_tokens": len(self._sequence.prompt) - cached - written,
            "cache_creation_input_tokens": written,
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
        content["input"] = block.arguments
    else:
        content["text" if block.kind == "text" else "thinking"] = block.text
    return content


AnthropicRoutes = make_extension(__name__, router, models_router)
