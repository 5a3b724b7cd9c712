"""The routes that compare texts: `/v1/score` of vLLM, `/v1/rerank` of Jina and Cohere.

Scores come from a cross-encoder, from a language model that answers yes or no, or from the cosine
of embeddings, depending on the served model. Used by the routes of other dialects and by the gRPC
service. Must not depend on the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NotRequired

import numpy as np

from frame.core.interfaces.model import Task
from frame.core.interfaces.sampling_params import MAX_INT
from frame.entrypoints.http.chat.request_media import Chat
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import sent_as
from frame.entrypoints.http.native.pooling import (
    CUT_FIELD,
    ActivationFields,
    PoolingReply,
    PoolingUsage,
    check_count,
    compute_vectors,
    list_reply,
    usage,
)
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_starter import Caller, Pair, Prompt, countable_tokens, encode_prompt
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.relevance import (
    TEMPLATE_ARGUMENTS,
    conversation,
    filled,
    finished,
    form_of,
    log_odds,
    paired,
    relevance,
    similarity,
)

router = ApiRouter(access=Access.USER)

RankedText = declare("RankedText", "text")
RankedDocument = declare("RankedDocument", "index relevance_score", document=NotRequired[RankedText])
Ranking = declare("Ranking", "id model", "Documents, best first.", usage=PoolingUsage, results=array(RankedDocument))
PairScore = declare("PairScore", "index score", object="score")
ScoreList = declare("ScoreList", base=PoolingReply, data=array(PairScore))


Render = Callable[[str, str], Prompt]  # query and document -> the model's input
BOUNDARY_TOKENS = 2  # which a text may have more inside a prompt than alone
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
    services.check_model(request.model, context.tenant)
    services.need_task(*TASKS)
    texts = [_text(document) for document in request.documents]
    check_count(len(texts), name)
    if request.top_n is not None and request.top_k is not None:
        raise ApiError(400, "top_n and top_k are the same; send one of them", "top_k")
    field, maximum = ("top_n", request.top_n) if request.top_k is None else ("top_k", request.top_k)
    if maximum is not None and maximum < 1:
        raise ApiError(400, f"{field} is {maximum}; it must be 1 or more", field)
    if (length := request.max_tokens_per_doc) is not None:
        if not 1 <= length <= MAX_INT:
            raise ApiError(400, f"max_tokens_per_doc is {length}; it must be from 1 to {MAX_INT}", "max_tokens_per_doc")
        texts = await _cut_documents(services, texts, length, context.tenant)
    with sent_as({**_names("query", name), CUT_FIELD: cut}):
        scores, count = await compute_scores(context, services, request, [(request.query, text) for text in texts], request.instruction)
    order = np.argsort(-scores, kind="stable")[:maximum].tolist()
    return [(index, float(scores[index])) for index in order], count


async def _cut_documents(services: Services, texts: list[str], maximum: int, tenant: str) -> list[str]:
    """The beginnings of the texts of at most so many tokens."""
    tokenizer = services.need_tokenizer()
    async with services.text_turns.hold_slot(tenant):
        return await asyncio.to_thread(tokenizer.cut_texts, texts, maximum)


async def _fit_pairs(
    services: Services, pairs: Sequence[tuple[str, str]], render: Render, maximum: int, tenant: str
) -> list[tuple[str, str]]:
    """The pairs with their second texts cut so that each prompt has at most `maximum` tokens.
    Raises ApiError 400 where the rest has more."""
    fitted = [*pairs]
    for query in dict.fromkeys(query for query, _ in pairs):
        bare = render(query, "")
        assert isinstance(bare, str | Chat)
        room = maximum - len(await encode_prompt(services, bare, maximum=countable_tokens(services), owner=tenant)) - BOUNDARY_TOKENS
        if room < 1:
            sentence = f"the query and the prompt around it leave no room for a document in {maximum} tokens; shorten the query"
            raise ApiError(400, sentence, "query")
        places = [i for i, pair in enumerate(pairs) if pair[0] == query]
        texts = await _cut_documents(services, [pairs[i][1] for i in places], room, tenant)
        for i, text in zip(places, texts, strict=True):
            fitted[i] = (query, text)
    return fitted


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
    services.check_model(request.model, context.tenant)
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
    tokenizer, maximum = services.need_tokenizer(), request.truncate_length(services)
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
    render: Render = Pair
    if form == "chat":
        render = lambda query, document: Chat(conversation(query, document, instruction), None, dict(TEMPLATE_ARGUMENTS))  # noqa: E731
    elif form == "text" and services.score_prompt is not None:
        render = partial(filled, services.score_prompt, instruction=instruction)
    if form != "pair" and maximum is not None:  # the prompt ends with what the model answers: the document is cut instead
        pairs = await _fit_pairs(services, pairs, render, maximum, context.tenant)
        request = request.model_copy(update={"truncate_prompt_tokens": None, "truncation": None})
    prompts = [render(*pair) for pair in pairs]
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
