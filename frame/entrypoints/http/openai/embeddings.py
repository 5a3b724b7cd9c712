"""The route `/v1/embeddings` of the OpenAI API, and what other embedding routes share with it. Used
by the embedding routes of Cohere, Ollama, TEI and vLLM. Must not depend on the engine."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from frame.core.interfaces.model import SentenceTransformersConfig
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native.pooling import PoolingRequestFields, check_count, compute_vectors, list_reply
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_starter import Caller, Prompt
from frame.entrypoints.http.response_models.openai import EmbeddingList
from frame.entrypoints.http.services import Services
from frame.entrypoints.relevance import shortened

router = ApiRouter(access=Access.USER)


class EmbeddingRequest(PoolingRequestFields):
    """An embedding request: texts or token ids. `dimensions`: length to which vectors are cut
    (Matryoshka models). `prompt_name`: one of the checkpoint's prompts, put before each text."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


@router.post("/v1/embeddings", responses=responds_with(EmbeddingList))
async def embeddings(request: EmbeddingRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings."""
    vectors, count = await compute_embeddings(context, services, request)
    encoded = enumerate(encode_vectors(vectors, request.encoding_format))
    data = ({"object": "embedding", "index": index, "embedding": vector} for index, vector in encoded)
    return list_reply(services, context.reply.rid if context.reply is not None else "", data, count, vectors.size)


async def compute_embeddings(context: Caller, services: Services, request: EmbeddingRequest) -> tuple[np.ndarray, int]:
    """(float32 [inputs, dimensions], number of prompt tokens). Raises ApiError."""
    services.need_task("embed")
    prompts = to_prompts(request, services)
    width = services.resolved.model.hidden_size
    if request.dimensions is not None and not 1 <= request.dimensions <= width:
        raise ApiError(400, f"dimensions is {request.dimensions}; it must be from 1 to {width}", "dimensions")
    vectors, count = await compute_vectors(context, services, request, prompts, ("embed",), "embd-")
    pooling = services.resolved.pooling
    return shortened(vectors, request.dimensions, pooling is not None and pooling.normalize), count


def to_prompts(request: EmbeddingRequest, services: Services) -> list[Prompt]:
    """The inputs as a list, with the prompt of `prompt_name` before each text. Raises ApiError 400
    for mixed kinds of inputs, or an unknown prompt."""
    given = request.input
    several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    check_count(len(several), "input")
    kind = str if isinstance(several[0], str) else list
    if not all(isinstance(one, kind) for one in several) or (kind is list and not all(type(i) is int for one in several for i in one)):
        raise ApiError(400, "input mixes kinds; send a string, a list of strings, token ids, or a list of lists of token ids", "input")
    sentence = services.resolved.model.sentence or SentenceTransformersConfig()
    try:
        lead = sentence.lead(request.prompt_name)
    except ValueError as error:
        raise ApiError(400, str(error), "prompt_name") from None
    return [f"{lead}{text}" for text in several] if kind is str and lead else several


def encode_vectors(vectors: np.ndarray, form: str | None) -> Iterator[Any]:
    """Vectors as lists of numbers or, with form `base64`, as base64 of little-endian float32."""
    if form == "base64":
        return (base64.b64encode(vector.tobytes()).decode() for vector in vectors)
    return (vector.tolist() for vector in vectors)
