"""Response bodies of the Responses and Conversations APIs. Must not depend on a route."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from frame.entrypoints.http.response_models.openai import CachedTokens, Page, ReasoningTokens, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(TypedDict):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None


class FunctionCallItem(TypedDict):
    """`arguments` is JSON text."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CustomToolCallItem(TypedDict):
    type: Literal["custom_tool_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokenDetails(CachedTokens):
    cache_write_tokens: int


class ResponsesUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: str


class ConversationReference(TypedDict):
    id: str


class ResponseObject(TypedDict):
    """A response. Most fields are those of the request, with their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    completed_at: int | None
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    conversation: ConversationReference | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    moderation: None
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt: None
    prompt_cache_key: str | None
    prompt_cache_options: None
    prompt_cache_retention: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponsesUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """An event of a streamed response. `type` says which fields it has; `response.created`,
    `response.in_progress` and the last event have `response`."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]


class InputTokenCount(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


# Stored items keep the fields that their sender gave them, besides `type`, `id` and `status`.
StoredItem = dict[str, Any]


class ItemList(Page):
    data: list[StoredItem]


class Conversation(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
