"""Response bodies of the APIs of Ollama, Cohere, text-embeddings-inference, vLLM and SGLang. Must
not depend on a route."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class OllamaFunction(TypedDict):
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    id: str
    function: OllamaFunction


class OllamaMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaHead(TypedDict):
    """The last object has `done_reason`, counts of tokens and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    eval_count: NotRequired[int]


class OllamaChat(OllamaHead):
    message: OllamaMessage


class OllamaCompletion(OllamaHead):
    response: str
    thinking: NotRequired[str]


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaCard(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(TypedDict):
    models: list[OllamaCard]


class OllamaDescription(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class Version(TypedDict):
    version: str


class CohereUnits(TypedDict):
    input_tokens: int


class CohereMeta(TypedDict):
    api_version: Version
    billed_units: CohereUnits


class CohereEmbeddings(TypedDict):
    """`embeddings` by type: numbers (`float`), or base64 of little-endian float32 (`base64`)."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[str, list[list[float]] | list[str]]
    texts: list[str]
    meta: CohereMeta


class TeiScore(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


class ServerLoad(TypedDict):
    server_load: int


class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
    model_type: str
    architectures: list[str]
    max_model_len: int


class SeparatedReasoning(TypedDict):
    reasoning_text: str
    text: str


class ParsedCall(TypedDict):
    """`parameters` is JSON text."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(TypedDict):
    normal_text: str
    calls: list[ParsedCall]


class OllamaErrorResponse(TypedDict):
    """The error body of the Ollama API."""

    error: str


class TeiErrorResponse(TypedDict):
    """The error body of text-embeddings-inference."""

    error: str
    error_type: str


class CohereErrorResponse(TypedDict):
    """The error body of the Cohere API."""

    id: str
    message: str
