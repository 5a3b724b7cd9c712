"""The routes of Hugging Face's text-embeddings-inference, beside its `/tokenize`. `/rerank` accepts
the requests of `/v1/rerank` too. Must not depend on the engine."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import Field

from frame.entrypoints.http.errors import ApiError, ErrorShape, without_folders
from frame.entrypoints.http.failures import sent_as
from frame.entrypoints.http.native.pooling import (
    CUT_FIELD,
    MAX_INPUTS,
    ClassifyRequest,
    EmbeddingRequest,
    check_count,
    compute_classes,
    compute_embeddings,
    compute_token_vectors,
    get_labels,
    paced,
    value_array,
)
from frame.entrypoints.http.native.ranking import Document, Ranking, RerankRequest, rank_documents, ranking_of
from frame.entrypoints.http.native.vector_encoding import encode_vectors
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import Pair
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.relevance import similarity
from frame.entrypoints.version import package_version

ERROR_TYPES = {400: "Validation", 413: "Validation", 429: "Overloaded", 503: "Overloaded"}
TRUNCATE = "truncate: true"  # the remedy that sentences name for long inputs

TeiScore = declare("TeiScore", "index score text?")
TeiClass = declare("TeiClass", "score label")
TeiErrorResponse = declare("TeiErrorResponse", "error error_type", "The error body of text-embeddings-inference.")
TeiInfo = declare(
    "TeiInfo",
    "model_id model_dtype version",
    "The model, and the limits of one request.",
    model_type=dict[str, Any],
    model_sha=str | None,
    max_concurrent_requests=int,
    max_input_length=int,
    max_batch_tokens=int,
    max_client_batch_size=int,
    auto_truncate=bool,
)


class TextRequest(RequestBody):
    """Fields of the routes that read texts."""

    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None

    @property
    def max_length(self) -> int | None:
        """`truncate_prompt_tokens` of the request."""
        return -1 if self.truncate else None


class EmbedRequest(TextRequest):
    inputs: str | list[str]
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None

    def to_embedding_request(self) -> EmbeddingRequest:
        return EmbeddingRequest(
            input=self.inputs,  # type: ignore[arg-type]  # a list of texts
            prompt_name=self.prompt_name,
            dimensions=self.dimensions,
            truncate_prompt_tokens=self.max_length,
            normalize=self.normalize is not False,
        )


class EmbedAllRequest(TextRequest):
    """`inputs` may be token ids, one list or several."""

    inputs: str | list[str | int | list[int]]
    prompt_name: str | None = None


class PredictRequest(TextRequest):
    """`inputs`: a text, a pair of texts, or a list of lists of one or two texts."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False

    def to_prompts(self) -> tuple[list[str | Pair], bool]:
        """(the texts and pairs, whether there is one alone). Raises ApiError 400."""
        if isinstance(self.inputs, str):
            return [self.inputs], True
        check_count(len(self.inputs), "inputs")
        if all(isinstance(each, str) for each in self.inputs):
            return [_as_prompt(self.inputs, "inputs")], True
        return [_as_prompt(each, f"inputs[{i}]") for i, each in enumerate(self.inputs)], False


def _as_prompt(texts: Any, place: str) -> str | Pair:
    if isinstance(texts, str) or not 1 <= len(texts) <= 2:
        raise ApiError(400, f"{place}: expected a list of one text, or of two", place)
    return texts[0] if len(texts) == 1 else Pair(*texts)


class SimilarityInputs(RequestBody):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(TextRequest):
    prompt_name: str | None = None


class SimilarityRequest(RequestBody):
    inputs: SimilarityInputs
    parameters: SimilarityParameters = Field(default_factory=SimilarityParameters)


class AnyRerankRequest(RerankRequest):
    """A rerank request of text-embeddings-inference (`texts`) or of Jina (`documents`)."""

    documents: list[str | Document] = Field(default_factory=list)
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False
    truncation_direction: Literal["right", "Right"] | None = None


class RootRequest(TextRequest):
    """A request of `/embed` or `/similarity`, `/predict` or `/rerank`, by the model's task."""

    inputs: str | list[str | list[str]] | SimilarityInputs | None = None
    parameters: SimilarityParameters | None = None
    query: str | None = None
    texts: list[str] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    raw_scores: bool = False
    return_text: bool = False

    def to_request(self, kind: type[Any]) -> Any:
        """The request of a route. Raises ApiError 400 for fields that it does not have."""
        # in the order of the class: a set's order differs from process to process
        named = [name for name in type(self).model_fields if name in self.model_fields_set]
        sent = {name: value for name in named if (value := getattr(self, name)) is not None}
        for name in sent:
            if name not in kind.model_fields:
                raise ApiError(400, f"{name} is not a field for a model of this task; leave it out", name)
        for name, each in kind.model_fields.items():
            if each.is_required() and name not in sent:
                raise ApiError(400, f"{name} is missing; send it", name)
        return kind(**sent)


def token_reply(each: list[np.ndarray]) -> Any:
    """Token vectors of several texts as plain lists."""
    count = sum(vectors.size for vectors in each)
    return paced(value_array((value_array(encode_vectors(vectors, None), count) for vectors in each), count, is_nested=True), count)


def _error_body(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message, "error_type": ERROR_TYPES.get(error.status, "Backend")})


ERRORS = ErrorShape(_error_body, _error_body, model=TeiErrorResponse)

router = ApiRouter(access=Access.USER, errors=ERRORS)
rerank_router = ApiRouter(access=Access.USER)


@router.post("/", responses=responds_with(list[list[float]] | list[float] | array(TeiClass) | array(array(TeiClass)) | array(TeiScore)))
async def root(request: RootRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Embed, classify or rank, as the model does."""
    if isinstance(request.inputs, SimilarityInputs):
        return await compute_similarity(request.to_request(SimilarityRequest), context, services)
    if services.resolved.task == "embed":
        return await embed(request.to_request(EmbedRequest), context, services)
    if request.query is None and request.texts is None:
        return await predict(request.to_request(PredictRequest), context, services)
    return await rerank(request.to_request(AnyRerankRequest), context, services)


@router.get("/info", responses=responds_with(TeiInfo))
async def info(services: ServicesDep) -> Any:
    """Describe the model and the limits of a request."""
    resolved = services.resolved
    return {
        "model_id": without_folders(resolved.user.model.path),
        "model_sha": None,
        "model_dtype": resolved.dtype,
        "model_type": _model_type(services),
        "max_concurrent_requests": resolved.user.scheduler.max_queued_requests,
        "max_input_length": services.client.limits.max_pooling_tokens,
        "max_batch_tokens": resolved.chunked_prefill_size,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "version": package_version(),
    }


def _model_type(services: Services) -> dict[str, Any]:
    resolved = services.resolved
    if resolved.task == "embed" and resolved.pooling is not None:
        return {"embedding": {"pooling": resolved.pooling.mode}}
    if resolved.task == "classify":
        labels = get_labels(services)
        maps = {"id2label": {str(i): name for i, name in enumerate(labels)}, "label2id": {name: i for i, name in enumerate(labels)}}
        return {"reranker" if len(labels) == 1 or _has_label_tokens(services) else "classifier": maps}
    return {"generation": {}}


def _has_label_tokens(services: Services) -> bool:
    pooling = services.resolved.pooling
    return bool(pooling and pooling.label_tokens)


@router.post("/embed", responses=responds_with(list[list[float]]))
async def embed(request: EmbedRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings, as a plain list."""
    with sent_as({"the input": "a text of inputs", "input": "inputs", CUT_FIELD: TRUNCATE}):
        vectors, _ = await compute_embeddings(context, services, request.to_embedding_request())
    return paced(value_array(encode_vectors(vectors, None), vectors.size), vectors.size)


@router.post("/embed_all", responses=responds_with(list[list[list[float]]]))
async def embed_all(request: EmbedAllRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create an embedding of each token, as plain lists."""
    embedding = EmbeddingRequest(input=request.inputs, prompt_name=request.prompt_name, truncate_prompt_tokens=request.max_length)
    with sent_as({"the input": "a text of inputs", "input": "inputs", CUT_FIELD: TRUNCATE}):
        each, _ = await compute_token_vectors(context, services, embedding)
    return token_reply(each)


@router.post("/similarity", responses=responds_with(list[float]))
async def compute_similarity(request: SimilarityRequest, context: ContextDep, services: ServicesDep) -> Any:
    """The cosine similarity of each sentence to the source sentence."""
    check_count(len(request.inputs.sentences), "inputs.sentences")
    texts = [request.inputs.source_sentence, *request.inputs.sentences]
    sent = request.parameters
    embedding = EmbeddingRequest(input=texts, prompt_name=sent.prompt_name, truncate_prompt_tokens=sent.max_length)  # type: ignore[arg-type]
    names = {"the input": "a sentence of inputs", "input": "inputs.sentences", "prompt_name": "parameters.prompt_name"}
    with sent_as({**names, CUT_FIELD: f"parameters.{TRUNCATE}"}):
        vectors, _ = await compute_embeddings(context, services, embedding)
    return similarity(vectors[:1], vectors[1:]).tolist()


@router.post("/predict", responses=responds_with(array(TeiClass) | array(array(TeiClass))))
async def predict(request: PredictRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Classify texts or pairs: the classes of each, the likeliest first."""
    services.need_task("classify")
    prompts, is_single = request.to_prompts()
    fields = ClassifyRequest(input="", truncate_prompt_tokens=request.max_length, use_activation=not request.raw_scores)
    with sent_as({"the input": "a text of inputs", "input": "inputs", CUT_FIELD: TRUNCATE}):
        scores, _ = await compute_classes(context, services, fields, prompts)
    names = get_labels(services)
    ranked = [[{"score": float(row[i]), "label": names[i]} for i in np.argsort(-row, kind="stable").tolist()] for row in scores]
    return ranked[0] if is_single else ranked


@rerank_router.post("/rerank", responses=responds_with(array(TeiScore) | Ranking))
async def rerank(request: AnyRerankRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Rank texts by their relevance to a query, best first."""
    if request.raw_scores:
        request.use_activation = False
    if request.truncate:
        if request.truncate_prompt_tokens is not None or request.truncation is not None:
            raise ApiError(400, "truncate, truncation and truncate_prompt_tokens exclude each other; keep one", "truncate")
        request.truncate_prompt_tokens = -1
    if request.texts is None:
        return await ranking_of(context, services, request)
    return await _rank_texts(request, request.texts, context, services)


async def _rank_texts(request: AnyRerankRequest, texts: list[str], context: RequestContext, services: Services) -> list[dict[str, Any]]:
    ranking, _ = await rank_documents(context, services, request.model_copy(update={"documents": [*texts]}), "texts", TRUNCATE)
    results: list[dict[str, Any]] = [{"index": index, "score": score} for index, score in ranking]
    if request.return_text:
        for result in results:
            result["text"] = texts[result["index"]]
    return results


TeiRoutes = make_extension(__name__, router, rerank_router)
