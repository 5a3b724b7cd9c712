"""Response bodies of the OpenAI API, with the fields that vLLM and SGLang add: chat completions,
completions, models, embeddings, moderations, files and batches.

Used by the OpenAI routes and by dialects that answer in the same shape. Must not depend on a route.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort", "error"]


class ErrorDetail(TypedDict):
    """`param`: the field of the request that the error is about. `code`: a name of the error, or
    the status."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorResponse(TypedDict):
    """The error body of the OpenAI API and of the server's own routes."""

    error: ErrorDetail


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class CompletionTokensDetails(TypedDict):
    """`reasoning_tokens`: of chats. The others: drafted tokens of speculative decoding."""

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    """Numbers of tokens. Each prompt counts once, even with `n` choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class PoolingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class PoolingReply(TypedDict):
    """A list with one entry for each input; each route adds `data`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage


class FunctionCall(TypedDict):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A piece of the tool call with this index. The first piece has id, type and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class TopLogprob(TypedDict):
    """`bytes`: the token in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class PromptLogprob(TypedDict):
    """An entry of vLLM's `prompt_logprobs`. `rank` counts from 1."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class ChatMessage(TypedDict):
    """`reasoning` and `reasoning_content` are the same text."""

    role: str
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[FunctionCall]


class ChatDelta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[FunctionCallDelta]


class AnyChoice(TypedDict):
    index: int
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Choice(AnyChoice):
    """`stop_reason` (vLLM) and `matched_stop` (SGLang): the stop string or token that ended it."""

    matched_stop: str | int | None
    stop_reason: str | int | None


class ChunkChoice(AnyChoice):
    matched_stop: NotRequired[str | int | None]
    stop_reason: NotRequired[str | int | None]


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(ChunkChoice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ResponseHead(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"]


class ChatCompletion(ResponseHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletionChunk(ResponseHead):
    """An event of a streamed chat completion. The stream ends with `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(ChunkChoice):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(ResponseHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(ResponseHead):
    """An event of a streamed completion. The stream ends with `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Embedding(TypedDict):
    """`embedding`: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(PoolingReply):
    data: list[Embedding]


class Moderation(TypedDict):
    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]


class ModerationList(TypedDict):
    id: str
    model: str
    results: list[Moderation]


class File(TypedDict):
    id: str
    object: Literal["file"]
    filename: str
    purpose: str
    bytes: int
    created_at: int
    status: Literal["processed"]


class Page(TypedDict):
    """`first_id` and `last_id` are empty for an empty page."""

    object: Literal["list"]
    first_id: str
    last_id: str
    has_more: bool


class FileList(Page):
    data: list[File]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrorEntry(TypedDict):
    code: str
    message: str


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchErrorEntry]


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class Batch(TypedDict):
    """Times are in seconds since the epoch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    status: str
    completion_window: str
    metadata: dict[str, str] | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    errors: BatchErrors | None


class BatchList(Page):
    data: list[Batch]


class RenderedRequest(TypedDict):
    """A prompt and its sampling parameters, as vLLM's render routes return them."""

    request_id: str
    model: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int


class TranscriptionUsage(TypedDict):
    """`seconds`: of type duration. The numbers of tokens: of type tokens."""

    type: Literal["duration", "tokens"]
    seconds: NotRequired[float]
    input_tokens: NotRequired[int]
    output_tokens: NotRequired[int]
    total_tokens: NotRequired[int]


class TranscriptionEvent(TypedDict):
    """`delta`: of a piece of text. `text` and `usage`: of the last event."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: NotRequired[str]
    text: NotRequired[str]
    usage: NotRequired[TranscriptionUsage]


class TranscriptionSegment(TypedDict):
    """`avg_logprob` is that of the segment's window."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float


class TranscriptionObject(TypedDict):
    """A transcription; with `response_format: verbose_json` all fields."""

    text: str
    usage: TranscriptionUsage
    task: NotRequired[Literal["transcribe", "translate"]]
    language: NotRequired[str | None]
    duration: NotRequired[float]
    segments: NotRequired[list[TranscriptionSegment]]
