"""Response bodies of the server's own routes: generate, tokenize, rerank, score, classify, pooling
and health. Must not depend on a route."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from frame.entrypoints.http.response_models.openai import PoolingReply, PoolingUsage

LogprobEntry = tuple[float | None, int, str | None]  # log-probability, token id, text


class GenerateFinish(TypedDict):
    """`length`: number of generated tokens. `matched`: the stop string or token."""

    type: Literal["stop", "length", "abort", "error"]
    length: NotRequired[int]
    matched: NotRequired[str | int | None]


class GenerateMeta(TypedDict):
    """`e2e_latency` in seconds."""

    id: str
    finish_reason: GenerateFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    output_token_logprobs: NotRequired[list[LogprobEntry]]
    output_top_logprobs: NotRequired[list[list[LogprobEntry]]]
    input_token_logprobs: NotRequired[list[LogprobEntry]]
    input_top_logprobs: NotRequired[list[list[LogprobEntry]]]


class GenerateResult(TypedDict):
    """One sequence with all its text and tokens so far. The stream ends with `data: [DONE]`."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: NotRequired[int]


class TokenizeResult(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class DetokenizeResult(TypedDict):
    """`text` and `prompt` are the same."""

    text: str
    prompt: str


class Health(TypedDict):
    """An empty object; the status is the answer."""


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(TypedDict):
    """Documents, best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]


class PairScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(PoolingReply):
    data: list[PairScore]


class Classification(TypedDict):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(PoolingReply):
    data: list[Classification]
    labels: list[str]


class PooledOutput(TypedDict):
    """`data`: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PooledList(PoolingReply):
    data: list[PooledOutput]
