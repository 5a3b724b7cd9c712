"""The routes `/v1/rerank` of Jina and Cohere and `/v1/score` of vLLM.

Scores come from a cross-encoder, from a language model that answers yes or no, or from the cosine
of embeddings, depending on the served model. Must not depend on the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from frame.core.interfaces.model import Task
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import sent_as
from frame.entrypoints.http.native.pooling import CUT_FIELD, PoolingRequestFields, check_count, compute_vectors, list_reply, usage
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_starter import Caller, Chat, Pair, Prompt
from frame.entrypoints.http.response_models.native import Ranking, ScoreList
from frame.entrypoints.http.services import Services
from frame.entrypoints.relevance import TEMPLATE_ARGUMENTS, conversation, filled, form_of, paired, relevance, similarity

router = ApiRouter(access=Access.USER)

TASKS: tuple[Task, ...] = ("embed", "classify")


class Document(RequestBody):
    text: str


class RerankRequest(PoolingRequestFields):
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreRequest(PoolingRequestFields):
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
    return {"id": name, "model": services.resolved.served_name, "usage": usage(count), "results": results}


async def rank_documents(
    context: Caller, services: Services, request: RerankRequest, name: str = "documents", cut: str = CUT_FIELD
) -> tuple[list[tuple[int, float]], int]:
    """(index and relevance of the documents, best first; number of prompt tokens). Raises ApiError.
    For errors, `name`: the request field of the documents; `cut`: the field that has them cut."""
    services.need_task(*TASKS)
    texts = [_text(document) for document in request.documents]
    check_count(len(texts), name)
    if request.top_n is not None and request.top_n < 1:
        raise ApiError(400, f"top_n is {request.top_n}; it must be 1 or more", "top_n")
    with sent_as({**_names("query", name), CUT_FIELD: cut}):
        scores, count = await compute_scores(context, services, request, [(request.query, text) for text in texts], request.instruction)
    order = np.argsort(-scores, kind="stable")[: request.top_n].tolist()
    return [(index, float(scores[index])) for index in order], count


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
    return list_reply(services, f"score-{uuid.uuid4().hex}", data, count, len(data))


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
    context: Caller, services: Services, request: PoolingRequestFields, pairs: Sequence[tuple[str, str]], instruction: str | None
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
    vectors, count = await compute_vectors(context, services, request, prompts, TASKS)
    return relevance(vectors), count


def _texts(request: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """The name and the texts of the one field of `names` that is set. Raises ApiError 400."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise ApiError(400, f"send one of {' and '.join(names)}", names[0])
    found = getattr(request, given[0])
    texts = [found] if isinstance(found, str) else found
    check_count(len(texts), given[0])
    return given[0], texts
