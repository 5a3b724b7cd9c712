"""The gRPC methods of pooling models (embed, rerank, score, classify) and of moderation, over the
functions of the HTTP routes. Must not know a socket."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from frame.entrypoints.grpc.calls import GrpcCaller
from frame.entrypoints.grpc.schema import Schema
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import sent_as
from frame.entrypoints.http.native.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    classify_texts,
    compute_embeddings,
    compute_token_vectors,
    get_labels,
)
from frame.entrypoints.http.native.ranking import RerankRequest, ScoreRequest, rank_documents, score_pairs
from frame.entrypoints.http.openai.moderations import ModerationRequest, is_flagged, moderate_texts
from frame.entrypoints.http.paced_json import run_turns
from frame.entrypoints.http.services import Services


class Pooling:
    """The methods raise ApiError; `CallHandlers` wraps them."""

    def __init__(self, services: Services, schema: Schema) -> None:
        self._services = services
        self._schema = schema

    async def embed(self, request: Any, caller: GrpcCaller) -> Any:
        if bool(request.texts) == bool(request.token_ids):
            raise ApiError(400, "send either texts or token_ids", "texts")
        inputs = list(request.texts) or [list(one.ids) for one in request.token_ids]
        body = EmbeddingRequest(
            input=inputs, dimensions=_set(request, "dimensions"), prompt_name=_set(request, "prompt_name"), **_options(request, caller)
        )
        reply, is_each = self._schema["EmbedReply"](), request.per_token
        with _named("texts" if request.texts else "token_ids"):
            compute: Any = compute_token_vectors if is_each else compute_embeddings
            vectors_of_inputs, reply.prompt_tokens = await compute(caller, self._services, body)
        if is_each:
            places = ((reply.token_vectors.add(), vectors) for vectors in vectors_of_inputs)
            steps = (place.vectors.add(values=row.tolist()) for place, vectors in places for row in vectors)
        else:
            steps = (reply.vectors.add(values=row.tolist()) for row in vectors_of_inputs)
        await run_turns(self._services.formatting, caller.tenant, steps)
        return reply

    async def rerank(self, request: Any, caller: GrpcCaller) -> Any:
        body = RerankRequest(
            query=request.query, documents=list(request.documents), top_n=_set(request, "top_n"),
            instruction=_set(request, "instruction"), **_options(request, caller),
        )  # fmt: skip
        ranking, count = await rank_documents(caller, self._services, body)
        make_ranked = self._schema["Ranked"]
        results = [make_ranked(index=index, relevance_score=relevance_score) for index, relevance_score in ranking]
        return self._schema["RerankReply"](results=results, prompt_tokens=count)

    async def score(self, request: Any, caller: GrpcCaller) -> Any:
        body = ScoreRequest(
            queries=list(request.queries), items=list(request.items), instruction=_set(request, "instruction"), **_options(request, caller)
        )
        scores, count = await score_pairs(caller, self._services, body)
        return self._schema["ScoreReply"](scores=scores.tolist(), prompt_tokens=count)

    async def classify(self, request: Any, caller: GrpcCaller) -> Any:
        body = ClassifyRequest(input=list(request.texts), **_options(request, caller))
        with _named("texts"):
            vectors, count = await classify_texts(caller, self._services, body)
        names = get_labels(self._services)
        reply = self._schema["ClassifyReply"](labels=names, prompt_tokens=count)
        steps = (reply.classes.add(label=names[int(row.argmax())], probabilities=row.tolist()) for row in vectors)
        await run_turns(self._services.formatting, caller.tenant, steps)
        return reply

    async def moderate(self, request: Any, caller: GrpcCaller) -> Any:
        body = ModerationRequest(input=list(request.texts), **_options(request, caller))
        with _named("texts"):
            scores_of_texts = await moderate_texts(caller, self._services, body)
        make_verdict = self._schema["Verdict"]
        results = [make_verdict(flagged=any(map(is_flagged, scores.values())), category_scores=scores) for scores in scores_of_texts]
        return self._schema["ModerateReply"](results=results)


def _named(name: str) -> AbstractContextManager[None]:
    """Errors of the field `input` name this field, which the client sent."""
    return sent_as({"the input": "the input", "input": name})


def _set(request: Any, name: str) -> Any:
    """An optional field; None if it is not set."""
    return getattr(request, name) if request.HasField(name) else None


def _options(request: Any, caller: GrpcCaller) -> dict[str, Any]:
    """The fields that the bodies of all these routes share."""
    options = request.options
    return {
        "rid": options.id or None,
        "priority": options.priority,
        "cache_salt": options.cache_salt,
        "timeout": caller.time_left(),
        "model": options.model,
        "truncate_prompt_tokens": _set(options, "truncate_prompt_tokens"),
    }
