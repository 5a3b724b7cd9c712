"""Response bodies of the Anthropic API. Must not depend on a route."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


class AnthropicErrorResponse(TypedDict):
    """The error body of the Anthropic API."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(TypedDict):
    """`input_tokens` excludes tokens from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageDelta(TypedDict):
    """The delta of `content_block_delta` (with `type`), or of `message_delta`."""

    type: NotRequired[Literal["text_delta", "thinking_delta", "input_json_delta"]]
    text: NotRequired[str]
    thinking: NotRequired[str]
    partial_json: NotRequired[str]
    stop_reason: NotRequired[StopReason]
    stop_sequence: NotRequired[str | None]


class MessageEvent(TypedDict):
    """An event of a streamed message. `type` says which fields it has."""

    type: Literal["message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
                  "message_stop", "error"]  # fmt: skip
    message: NotRequired[AnthropicMessage]
    index: NotRequired[int]
    content_block: NotRequired[Block]
    delta: NotRequired[MessageDelta]
    usage: NotRequired[MessageUsage]
    error: NotRequired[AnthropicErrorDetail]


class MessageTokenCount(TypedDict):
    input_tokens: int


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str
