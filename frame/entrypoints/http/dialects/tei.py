"""The routes `/embed` and `/rerank` of Hugging Face's text-embeddings-inference. `/rerank` accepts
the requests of `/v1/rerank` too. Must not depend on the engine."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import Field

from frame.entrypoints.http.errors import ApiError, ErrorShape
from frame.entrypoints.http.failures import sent_as
from frame.entrypoints.http.native.pooling import (
    CUT_FIELD,
    Document,
    EmbeddingRequest,
    Ranking,
    RerankRequest,
    compute_embeddings,
    encode_vectors,
    paced,
    rank_documents,
    ranking_of,
    value_array,
)
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.response_types import array, declare

ERROR_TYPES = {400: "Validation", 413: "Validation", 429: "Overloaded", 503: "Overloaded"}
TRUNCATE = "truncate: true"  # the remedy that sentences name for long inputs

TeiScore = declare("TeiScore", "index score text?")
TeiErrorResponse = declare("TeiErrorResponse", "error error_type", "The error body of text-embeddings-inference.")


class EmbedRequest(RequestBody):
    inputs: str | list[str]
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class AnyRerankRequest(RerankRequest):
    """A rerank request of text-embeddings-inference (`texts`) or of Jina (`documents`)."""

    documents: list[str | Document] = Field(default_factory=list)
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False
    truncation_direction: Literal["right", "Right"] | None = None


def _error_body(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message, "error_type": ERROR_TYPES.get(error.status, "Backend")})


ERRORS = ErrorShape(_error_body, _error_body, model=TeiErrorResponse)

router = ApiRouter(access=Access.USER, errors=ERRORS)
rerank_router = ApiRouter(access=Access.USER)


@router.post("/embed", responses=responds_with(list[list[float]]))
async def embed(request: EmbedRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings, as a plain list."""
    max_length = -1 if request.truncate else None
    inputs: Any = request.inputs
    embedding = EmbeddingRequest(
        input=inputs, prompt_name=request.prompt_name, dimensions=request.dimensions, truncate_prompt_tokens=max_length
    )
    pooling = services.resolved.pooling
    if request.normalize is False and pooling is not None and pooling.normalize:
        raise ApiError(400, "normalize is false, and this model's vectors are normalized; leave it out", "normalize")
    with sent_as({"the input": "a text of inputs", "input": "inputs", CUT_FIELD: TRUNCATE}):
        vectors, _ = await compute_embeddings(context, services, embedding)
    if request.normalize is not False:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return paced(value_array(encode_vectors(vectors, None), vectors.size), vectors.size)


@rerank_router.post("/rerank", responses=responds_with(array(TeiScore) | Ranking))
async def rerank(request: AnyRerankRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Rank texts by their relevance to a query, best first."""
    if request.texts is None:
        return await ranking_of(context, services, request)
    if request.raw_scores:
        raise ApiError(400, "raw_scores is not supported; the scores are probabilities, leave it out", "raw_scores")
    max_length = -1 if request.truncate else request.truncate_prompt_tokens
    plain = RerankRequest(query=request.query, documents=[*request.texts], top_n=request.top_n, truncate_prompt_tokens=max_length)
    ranking, _ = await rank_documents(context, services, plain, "texts", TRUNCATE)
    results: list[dict[str, Any]] = [{"index": index, "score": score} for index, score in ranking]
    if request.return_text:
        for result in results:
            result["text"] = request.texts[result["index"]]
    return results


TeiRoutes = make_extension(__name__, router, rerank_router)
