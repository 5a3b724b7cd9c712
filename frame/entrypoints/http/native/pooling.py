"""The routes of pooling models: `/v1/embeddings` of OpenAI, `/v1/classify` and `/v1/score` of vLLM,
`/v1/rerank` of Jina and Cohere.

Scores come from a cross-encoder, from a language model that answers yes or no, or from the cosine
of embeddings, depending on the served model. Used by the routes of other dialects and by the gRPC
service, which compute vectors with it. Must not depend on the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NotRequired

import numpy as np

from frame.core.interfaces.model import SentenceTransformersConfig, Task
from frame.core.interfaces.sampling_params import MAX_INT, SamplingParams
from frame.entrypoints.http.chat.request_media import Chat
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import aborted, sent_as
from frame.entrypoints.http.native.vector_encoding import EmbedDtype, encode_vectors, respond_bytes
from frame.entrypoints.http.openai.completions_schema import to_template_messages
from frame.entrypoints.http.paced_json import INLINE_VALUES, Entries, PacedBody
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody, RequestOptions
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import Caller, Pair, Prompt, RequestPlan, start_request, wait_complete
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.relevance import (
    TEMPLATE_ARGUMENTS,
    conversation,
    filled,
    finished,
    form_of,
    log_odds,
    normalized,
    paired,
    relevance,
    similarity,
)

embeddings_router = ApiRouter(access=Access.USER)
router = ApiRouter(access=Access.USER)

PoolingUsage = declare("PoolingUsage", "prompt_tokens total_tokens")
PoolingReply = declare("PoolingReply", "id created model", object="list", usage=PoolingUsage)


MAX_INPUTS = 2048  # of one request
CUT_FIELD = "truncate_prompt_tokens: -1"  # the remedy that sentences name for long inputs
NOTHING_SAMPLED = SamplingParams(max_tokens=1)  # pooling models sample no token


class PoolingRequestFields(RequestOptions):
    """Fields of all pooling requests. `truncate_prompt_tokens`: length in tokens to which longer
    texts are cut; -1: the model's maximum, as Voyage's `truncation`."""

    model: str = ""
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation: bool | None = None
    add_special_tokens: bool | None = None

    def sent_name(self, parameter: str) -> str:
        return "input" if parameter == "prompt" else parameter

    def truncate_length(self, services: Services) -> int | None:
        """Tokens to which texts are cut; None: longer ones are refused. Raises ApiError."""
        asked, maximum = self.truncate_prompt_tokens, services.client.limits.max_pooling_tokens
        if self.truncation is not None and asked is not None:
            raise ApiError(400, "truncation and truncate_prompt_tokens exclude each other; keep one", "truncation")
        if asked is None:
            return maximum if self.truncation else None
        if asked == 0 or asked < -1 or asked > maximum:
            sentence = f"truncate_prompt_tokens is {asked}; it must be from 1 to {maximum}, or -1 for {maximum}"
            raise ApiError(400, sentence, "truncate_prompt_tokens")
        return maximum if asked == -1 else asked


class ActivationFields(PoolingRequestFields):
    """`use_activation`: false returns logits in place of probabilities, and vectors of any
    length."""

    use_activation: bool | None = None


def check_count(count: int, name: str) -> None:
    """Raise ApiError 400 for no inputs, or more than `MAX_INPUTS`."""
    if not count:
        raise ApiError(400, f"{name} is empty; send at least one", name)
    if count > MAX_INPUTS:
        raise ApiError(400, f"{name} has {count} entries; send at most {MAX_INPUTS} at once", name)


async def compute_vectors(
    context: Caller, services: Services, request: PoolingRequestFields, prompts: Sequence[Prompt], tasks: Sequence[Task], prefix: str = ""
) -> tuple[np.ndarray, int]:
    """(the model's outputs, float32 [prompts, width], without activation; number of prompt tokens).
    Raises ApiError."""
    services.check_model(request.model, context.tenant)
    services.need_task(*tasks)
    params, max_length = [NOTHING_SAMPLED] * len(prompts), request.truncate_length(services)
    special = request.add_special_tokens is not False
    plan = RequestPlan(prompts, params, request, add_special_tokens=special, tasks=tasks, max_length=max_length, prefix=prefix)
    state = await start_request(context, services, plan)
    sequences = await wait_complete(state)
    if len(state.vectors) < len(sequences):
        raise aborted()
    vectors = np.frombuffer(b"".join(state.vectors[s.index] for s in sequences), "<f4").reshape(len(sequences), -1)
    return vectors, sum(len(s.prompt) for s in sequences)


def list_reply(
    model: str, rid: str, data: Iterable[dict[str, Any]], num_tokens: int, num_values: int, more: dict[str, Any] | None = None
) -> Any:
    """The response of a route with one entry for each input, in OpenAI's shape. `num_values`: the
    numbers in all of `data`."""
    head = {"id": rid, "object": "list", "created": int(time.time()), "model": model}
    return paced({**head, "data": value_array(data, num_values), "usage": usage(num_tokens), **(more or {})}, num_values)


def value_array(rows: Iterable[Any], num_values: int) -> Any:
    """The rows of a response with so many numbers."""
    return list(rows) if num_values <= INLINE_VALUES else Entries(rows, batch=1)


def paced(reply: Any, num_values: int) -> Any:
    """The response, whose `value_array`s have so many numbers."""
    return reply if num_values <= INLINE_VALUES else PacedBody(reply)


def usage(num_tokens: int) -> dict[str, int]:
    """OpenAI's usage object of a response without generated tokens."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


# embeddings ---------------------------------------------------------------------------------------

Embedding = declare(
    "Embedding", "index", "`embedding`: numbers, or base64 of little-endian float32.", object="embedding", embedding=list[float] | str
)
EmbeddingList = declare("EmbeddingList", base=PoolingReply, data=array(Embedding))


class EmbeddingRequest(ActivationFields):
    """An embedding request: texts or token ids, or a conversation (`messages`), which the chat
    template makes one text. `dimensions`: length to which vectors are cut (Matryoshka models).
    `prompt_name`: one of the checkpoint's prompts, put before each text. `normalize`: whether
    vectors have length 1; None: as the checkpoint says; `use_activation` is the same. `embed_dtype`
    is that of base64 and bytes."""

    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    normalize: bool | None = None

    @property
    def is_bytes(self) -> bool:
        return self.encoding_format in ("bytes", "bytes_only")


@embeddings_router.post("/v1/embeddings", responses=responds_with(EmbeddingList))
async def embeddings(request: EmbeddingRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings."""
    vectors, count = await compute_embeddings(context, services, request)
    if request.is_bytes:
        return await send_bytes(context, services, request, vectors, count)
    encoded = enumerate(encode_vectors(vectors, request.encoding_format, request.embed_dtype))
    data = ({"object": "embedding", "index": index, "embedding": vector} for index, vector in encoded)
    return list_reply(
        services.response_model(request.model), context.state.rid if context.state is not None else "", data, count, vectors.size
    )


async def compute_embeddings(context: Caller, services: Services, request: EmbeddingRequest) -> tuple[np.ndarray, int]:
    """(float32 [inputs, dimensions], number of prompt tokens). Raises ApiError."""
    services.need_task("embed")
    prompts = to_prompts(request, services)
    width = services.resolved.model.hidden_size
    if request.dimensions is not None and not 1 <= request.dimensions <= width:
        raise ApiError(400, f"dimensions is {request.dimensions}; it must be from 1 to {width}", "dimensions")
    check_encoding(request)
    asked = request.use_activation if request.normalize is None else request.normalize
    vectors, count = await compute_vectors(context, services, request, prompts, ("embed",), "embd-")
    vectors = np.ascontiguousarray(vectors[:, : request.dimensions])
    if asked is None:
        return finished(vectors, services.resolved.pooling), count
    return normalized(vectors) if asked else vectors, count


async def send_bytes(context: RequestContext, services: Services, request: EmbeddingRequest, vectors: np.ndarray, count: int) -> None:
    """Send the vectors as bytes. Raises ApiError 400."""
    head = None
    if request.encoding_format == "bytes":
        name, model = f"embd-{uuid.uuid4().hex}", services.response_model(request.model)
        head = {"id": name, "created": int(time.time()), "model": model, "usage": usage(count)}
    await respond_bytes(context, vectors, request.embed_dtype, head)


def check_encoding(request: EmbeddingRequest) -> None:
    """Raise ApiError 400 for fields that contradict each other."""
    if None not in (request.normalize, request.use_activation) and request.normalize is not request.use_activation:
        raise ApiError(400, "normalize and use_activation contradict each other; send one of them", "use_activation")
    if request.embed_dtype not in (None, "float32") and request.encoding_format in (None, "float"):
        sentence = f"embed_dtype {request.embed_dtype} needs encoding_format base64 or bytes; send both, or neither"
        raise ApiError(400, sentence, "embed_dtype")


def to_prompts(request: EmbeddingRequest, services: Services) -> list[Prompt]:
    """The inputs as a list, with the prompt of `prompt_name` before each text. Raises ApiError 400
    for mixed kinds of inputs, or an unknown prompt."""
    sent: Any = request.input
    if (sent is None) == (request.messages is None):
        raise ApiError(400, "send either input or messages", "input")
    if request.messages is not None:
        if request.prompt_name is not None:
            raise ApiError(400, "prompt_name is for texts in input; leave it out", "prompt_name")
        return [Chat(to_template_messages(request.messages), None, {"add_generation_prompt": False})]
    several: list[Any] = [sent] if isinstance(sent, str) or (sent and isinstance(sent[0], int)) else sent
    check_count(len(several), "input")
    kind = str if isinstance(several[0], str) else list
    if not all(isinstance(one, kind) for one in several) or (kind is list and not all(type(i) is int for one in several for i in one)):
        raise ApiError(400, "input mixes kinds; send a string, a list of strings, token ids, or a list of lists of token ids", "input")
    lead = lead_of(services, request.prompt_name)
    return [f"{lead}{text}" for text in several] if kind is str and lead else several


def lead_of(services: Services, prompt_name: str | None) -> str:
    """The checkpoint's prompt of this name, else its default one. Raises ApiError 400."""
    try:
        return (services.resolved.model.sentence or SentenceTransformersConfig()).lead(prompt_name)
    except ValueError as error:
        raise ApiError(400, str(error), "prompt_name") from None


# classes ------------------------------------------------------------------------------------------

Classification = declare("Classification", "index label num_classes", probs=list[float])
ClassificationList = declare("ClassificationList", "labels", base=PoolingReply, data=array(Classification))


class ClassifyRequest(ActivationFields):
    input: str | list[str]


@router.post("/v1/classify", responses=responds_with(ClassificationList))
@router.post("/classify", responses=responds_with(ClassificationList))
async def classify(request: ClassifyRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Classify texts."""
    vectors, count = await classify_texts(context, services, request)
    names = get_labels(services)
    data = (
        {"index": index, "label": names[int(row.argmax())], "probs": row.tolist(), "num_classes": len(names)}
        for index, row in enumerate(vectors)
    )
    model = services.response_model(request.model)
    return list_reply(model, f"classify-{uuid.uuid4().hex}", data, count, vectors.size, {"labels": names})


async def classify_texts(context: Caller, services: Services, request: ClassifyRequest) -> tuple[np.ndarray, int]:
    """(probabilities float32 [texts, labels], number of prompt tokens). Raises ApiError."""
    services.need_task("classify")
    texts = [request.input] if isinstance(request.input, str) else request.input
    check_count(len(texts), "input")
    vectors, count = await compute_classes(context, services, request, texts)
    names = get_labels(services)
    if len(names) != vectors.shape[1]:
        raise ApiError(500, f"the model has {vectors.shape[1]} outputs, and its config.json names {len(names)} classes")
    return vectors, count


async def compute_classes(
    context: Caller, services: Services, request: ActivationFields, prompts: Sequence[Prompt]
) -> tuple[np.ndarray, int]:
    """(probabilities, or logits without `use_activation`, float32 [prompts, labels]; number of
    prompt tokens). Raises ApiError."""
    logits, count = await compute_vectors(context, services, request, prompts, ("classify",))
    return logits if request.use_activation is False else finished(logits, services.resolved.pooling), count


def get_labels(services: Services) -> list[str]:
    """The names of a classifier's outputs, in order."""
    pooling = services.resolved.pooling
    return list(pooling.label_tokens if pooling and pooling.label_tokens else services.resolved.model.labels)


# relevance ----------------------------------------------------------------------------------------

RankedText = declare("RankedText", "text")
RankedDocument = declare("RankedDocument", "index relevance_score", document=NotRequired[RankedText])
Ranking = declare("Ranking", "id model", "Documents, best first.", usage=PoolingUsage, results=array(RankedDocument))
PairScore = declare("PairScore", "index score", object="score")
ScoreList = declare("ScoreList", base=PoolingReply, data=array(PairScore))


TASKS: tuple[Task, ...] = ("embed", "classify")


class Document(RequestBody):
    text: str


class RerankRequest(ActivationFields):
    """`top_k` is Voyage's name of `top_n`. `max_tokens_per_doc`: tokens to which documents are cut
    before they are compared."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    top_k: int | None = None
    max_tokens_per_doc: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreRequest(ActivationFields):
    """Two lists of texts: `text_1` and `text_2`, or `queries` and `items` (or `documents`)."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    items: str | list[str] | None = None
    documents: str | list[str] | None = None
    instruction: str | None = None


@router.post("/v1/rerank", responses=responds_with(Ranking))
async def rerank(request: RerankRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Rank documents by their relevance to a query, best first."""
    return await ranking_of(context, services, request)


async def ranking_of(context: Caller, services: Services, request: RerankRequest) -> dict[str, Any]:
    """The response of `rerank`. Raises ApiError."""
    ranking, count = await rank_documents(context, services, request)
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": relevance_score} for index, relevance_score in ranking]
    if request.return_documents is not False:
        for result in results:
            result["document"] = {"text": _text(request.documents[result["index"]])}
    name = f"rerank-{uuid.uuid4().hex}"
    return {"id": name, "model": services.response_model(request.model), "usage": usage(count), "results": results}


async def rank_documents(
    context: Caller, services: Services, request: RerankRequest, name: str = "documents", cut: str = CUT_FIELD
) -> tuple[list[tuple[int, float]], int]:
    """(index and relevance of the documents, best first; number of prompt tokens). Raises ApiError.
    For errors, `name`: the request field of the documents; `cut`: the field that has them cut."""
    services.need_task(*TASKS)
    texts = [_text(document) for document in request.documents]
    check_count(len(texts), name)
    if request.top_n is not None and request.top_k is not None:
        raise ApiError(400, "top_n and top_k are the same; send one of them", "top_k")
    field, maximum = ("top_n", request.top_n) if request.top_k is None else ("top_k", request.top_k)
    if maximum is not None and maximum < 1:
        raise ApiError(400, f"{field} is {maximum}; it must be 1 or more", field)
    if request.max_tokens_per_doc is not None:
        texts = await _cut_documents(services, texts, request.max_tokens_per_doc, context.tenant)
    with sent_as({**_names("query", name), CUT_FIELD: cut}):
        scores, count = await compute_scores(context, services, request, [(request.query, text) for text in texts], request.instruction)
    order = np.argsort(-scores, kind="stable")[:maximum].tolist()
    return [(index, float(scores[index])) for index in order], count


async def _cut_documents(services: Services, texts: list[str], maximum: int, tenant: str) -> list[str]:
    """The beginnings of the texts of at most so many tokens. Raises ApiError 400."""
    if not 1 <= maximum <= MAX_INT:
        raise ApiError(400, f"max_tokens_per_doc is {maximum}; it must be from 1 to {MAX_INT}", "max_tokens_per_doc")
    tokenizer = services.need_tokenizer()
    async with services.text_turns.hold_slot(tenant):
        return await asyncio.to_thread(tokenizer.cut_texts, texts, maximum)


def _names(first: str, second: str) -> dict[str, str]:
    """The names that errors have for the texts of two fields, which one input may contain both."""
    return {"the input": f"the input of {first} and {second}", "input": second}


def _text(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


@router.post("/v1/score", responses=responds_with(ScoreList))
@router.post("/score", responses=responds_with(ScoreList))
async def score(request: ScoreRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Score pairs of texts by relevance or similarity."""
    scores, count = await score_pairs(context, services, request)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores.tolist())]
    return list_reply(services.response_model(request.model), f"score-{uuid.uuid4().hex}", data, count, len(data))


async def score_pairs(context: Caller, services: Services, request: ScoreRequest) -> tuple[np.ndarray, int]:
    """(scores float32 [pairs], number of prompt tokens). Raises ApiError."""
    services.need_task(*TASKS)
    (name, first), (other, second) = _texts(request, "text_1", "queries"), _texts(request, "text_2", "items", "documents")
    try:
        pairs = paired(first, second)
    except ValueError as error:
        raise ApiError(400, str(error), other) from None
    with sent_as(_names(name, other)):
        return await compute_scores(context, services, request, pairs, request.instruction)


async def compute_scores(
    context: Caller, services: Services, request: ActivationFields, pairs: Sequence[tuple[str, str]], instruction: str | None
) -> tuple[np.ndarray, int]:
    """(scores float32 [pairs], number of prompt tokens). Raises ApiError."""
    tokenizer = services.need_tokenizer()
    try:
        form = form_of(services.resolved, services.score_prompt, tokenizer.has_chat_template)
    except ValueError as error:
        raise ApiError(400, str(error), "model") from None
    if form == "vectors":
        unique = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors, count = await compute_vectors(context, services, request, unique, TASKS)
        places = {text: place for place, text in enumerate(unique)}
        first, second = (vectors[[places[pair[side]] for pair in pairs]] for side in (0, 1))
        return similarity(first, second), count
    prompts: list[Prompt]
    if form == "chat":
        prompts = [Chat(conversation(*pair, instruction), None, dict(TEMPLATE_ARGUMENTS)) for pair in pairs]
    elif form == "text" and services.score_prompt is not None:
        prompts = [filled(services.score_prompt, *pair, instruction) for pair in pairs]
    else:
        prompts = [Pair(*pair) for pair in pairs]
    logits, count = await compute_vectors(context, services, request, prompts, TASKS)
    if request.use_activation is False:
        return log_odds(logits), count
    return relevance(finished(logits, services.resolved.pooling)), count


def _texts(request: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """The name and the texts of the one field of `names` that is set. Raises ApiError 400."""
    set_names = [name for name in names if getattr(request, name) is not None]
    if len(set_names) != 1:
        raise ApiError(400, f"send one of {' and '.join(names)}", names[0])
    value = getattr(request, set_names[0])
    texts = [value] if isinstance(value, str) else value
    check_count(len(texts), set_names[0])
    return set_names[0], texts
