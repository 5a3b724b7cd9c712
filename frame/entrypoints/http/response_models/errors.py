"""Error bodies of each API, for `/openapi.json`. Must not depend on a route."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


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


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


class AnthropicErrorResponse(TypedDict):
    """The error body of the Anthropic API."""

    type: Literal["error"]
    error: AnthropicErrorDetail


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
