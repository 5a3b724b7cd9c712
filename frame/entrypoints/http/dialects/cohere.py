"""The API of Cohere: `/v2/embed`, `/v1/embed` and `/v2/rerank`; `cohere_chat` has `/v2/chat`,
`cohere_chat_v1` `/v1/chat`. Must not depend on the engine."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from frame.entrypoints.http.chat.request_fields import PART, check_object, check_string, to_content_parts
from frame.entrypoints.http.dialects.cohere_chat import ERRORS
from frame.entrypoints.http.dialects.cohere_chat import router as chat_router
from frame.entrypoints.http.dialects.cohere_chat_v1 import router as chat_v1_router
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import sent_as
from frame.entrypoints.http.native.pooling import (
    CUT_FIELD,
    EmbeddingRequest,
    compute_embeddings,
    paced,
    value_array,
)
from frame.entrypoints.http.native.ranking import Ranking, RerankRequest, ranking_of
from frame.entrypoints.http.native.vector_encoding import encode_vectors
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import Version, declare
from frame.entrypoints.http.services import Services

# input_type -> names of checkpoint prompts; the first that the checkpoint has is used
PROMPTS = {"search_query": ("search_query", "query"), "search_document": ("search_document", "document", "passage"),
           "classification": ("classification",), "clustering": ("clustering",)}  # fmt: skip


CohereUnits = declare("CohereUnits", "input_tokens")
CohereMeta = declare("CohereMeta", api_version=Version, billed_units=CohereUnits)
CohereEmbeddings = declare(
    "CohereEmbeddings",
    "id texts",
    "`embeddings` by type: numbers, or base64 of little-endian float32 (`base64`).",
    response_type="embeddings_by_type",
    embeddings=dict[str, list[list[float]] | list[list[int]] | list[str]],
    meta=CohereMeta,
)
# of `/v1/embed` without types
CohereFloats = declare("CohereFloats", "id texts", response_type="embeddings_floats", embeddings=list[list[float]], meta=CohereMeta)


class EmbedRequest(RequestBody):
    """A request of `/v2/embed`. `inputs`: texts as lists of parts. `truncate`: END cuts longer
    texts, NONE refuses them."""

    NESTED: ClassVar[Mapping[str, Shape]] = {"inputs": Shape("", {"content": PART})}

    model: str = ""
    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = None
    texts: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    images: list[str] | None = None
    embedding_types: list[Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: Literal["END", "NONE"] | None = None
    priority: int | None = None

    def to_embedding_request(self, services: Services) -> EmbeddingRequest:
        """The embedding request of this request. Raises ApiError 400."""
        if self.images:
            raise ApiError(400, "images is not supported; this model takes texts", "images")
        if (self.texts is None) == (self.inputs is None):
            raise ApiError(400, "send either texts or inputs", "texts")
        sentence = services.resolved.model.sentence
        known = sentence.prompts if sentence is not None else {}
        prompt = next((name for name in PROMPTS.get(self.input_type or "", ()) if name in known), None)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ApiError(400, f"max_tokens is {self.max_tokens}; it must be at least 1", "max_tokens")
        max_length = -1 if self.max_tokens is None else self.max_tokens  # -1: what the model takes
        return EmbeddingRequest(
            model=self.model,
            input=list(self.input_texts()),
            dimensions=self.output_dimension,
            prompt_name=prompt,
            truncate_prompt_tokens=None if self.truncate == "NONE" else max_length,
            priority=self.priority,
        )

    def input_texts(self) -> list[str]:
        if self.texts is not None:
            return self.texts
        return [_text(each.get("content"), f"inputs[{i}].content") for i, each in enumerate(self.inputs or ())]


def _text(content: Any, place: str) -> str:
    return "".join(check_string(check_object(part, place).get("text"), f"{place}.text") for part in to_content_parts(content, place))


def _quantize(vectors: np.ndarray, form: str) -> np.ndarray:
    """The vectors in an embedding type. The largest number of a vector in int8 is 127 or -127, and
    uint8 adds 128. A bit of ubinary says whether a number is positive, the first one highest;
    binary is ubinary less 128. Other types: unchanged."""
    if form in ("int8", "uint8"):
        scale = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), np.float32(1e-12))
        return np.rint(vectors / scale * 127).astype(np.int16) + (128 if form == "uint8" else 0)
    if form in ("binary", "ubinary"):
        return np.packbits(vectors > 0, axis=1).astype(np.int16) - (128 if form == "binary" else 0)
    return vectors


router = ApiRouter(access=Access.USER, errors=ERRORS)


@router.post("/v2/embed", responses=responds_with(CohereEmbeddings))
async def embed(request: EmbedRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings, as Cohere."""
    vectors, reply = await _embed(request, context, services, "2")
    return paced(reply, vectors.size)


@router.post("/v1/embed", responses=responds_with(CohereEmbeddings | CohereFloats))
async def embed_v1(request: EmbedRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings, as the first version of Cohere's API: without types, a list."""
    vectors, reply = await _embed(request, context, services, "1")
    if request.embedding_types is None:
        reply |= {"response_type": "embeddings_floats", "embeddings": reply["embeddings"]["float"]}
    return paced(reply, vectors.size)


async def _embed(request: EmbedRequest, context: RequestContext, services: Services, version: str) -> tuple[np.ndarray, dict[str, Any]]:
    name = "inputs" if request.texts is None else "texts"
    names = {"the input": f"a text of {name}", "input": name, CUT_FIELD: "truncate: END"}
    with sent_as({**names, "truncate_prompt_tokens": "max_tokens", "dimensions": "output_dimension"}):
        vectors, count = await compute_embeddings(context, services, request.to_embedding_request(services))
    forms = dict.fromkeys(request.embedding_types or ("float",))
    reply = {
        "id": uuid.uuid4().hex,
        "response_type": "embeddings_by_type",
        "embeddings": {form: value_array(encode_vectors(_quantize(vectors, form), form), vectors.size) for form in forms},
        "texts": request.input_texts(),
        "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": count}},
    }
    return vectors, reply


@router.post("/v2/rerank", responses=responds_with(Ranking))
async def rerank(request: RerankRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Rank documents by their relevance to a query, best first, as Cohere."""
    return await ranking_of(context, services, request)


CohereRoutes = make_extension(__name__, router, chat_router, chat_v1_router)
