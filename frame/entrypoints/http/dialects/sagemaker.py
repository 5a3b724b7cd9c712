"""The routes of a SageMaker container: `/ping`, and `/invocations`, which runs the route that the
body fits. Must not depend on the engine."""

from __future__ import annotations

from typing import Any

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native import classify, rerank
from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.openai import completions as openai
from frame.entrypoints.http.openai import embeddings
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody, parse_body
from frame.entrypoints.http.response_models.native import ClassificationList, GenerateResult, Health, Ranking, ScoreList
from frame.entrypoints.http.response_models.openai import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, EmbeddingList
from frame.entrypoints.http.services import Services

public_router = ApiRouter(access=Access.OPEN)
router = ApiRouter(access=Access.USER)

AnyBody = ChatCompletion | Completion | Ranking | ScoreList | GenerateResult | list[GenerateResult] | EmbeddingList | ClassificationList
AnyEvent = ChatCompletionChunk | CompletionChunk | GenerateResult

public_router.get("/ping", responses=responds_with(Health))(native.ready)
public_router.post("/ping", responses=responds_with(Health))(native.ready)

Target = tuple[type[RequestBody], Any]  # a request type and its handler

# fields of a body -> its request type and the handler of its route; the first match counts
TARGETS: tuple[tuple[tuple[str, ...], Target], ...] = (
    (("messages",), (openai.ChatRequest, openai.chat_completions)),
    (("prompt",), (openai.CompletionRequest, openai.completions)),
    (("query", "documents"), (rerank.RerankRequest, rerank.rerank)),
    (("text_1", "text_2"), (rerank.ScoreRequest, rerank.score)),
    (("queries", "items"), (rerank.ScoreRequest, rerank.score)),
    (("text",), (native.GenerateRequest, native.generate)),
    (("input_ids",), (native.GenerateRequest, native.generate)),
)


@router.post("/invocations", responses=responds_with(AnyBody, events=AnyEvent))
async def invocations(context: ContextDep, services: ServicesDep) -> Any:
    """Run any request: chat, completion, embedding, rerank, score, classify, generate."""
    value = await context.read_json()
    kind, handler = _target(value if isinstance(value, dict) else {}, services)
    body, ignored = parse_body(kind, value)
    context.ignored += ignored
    return await handler(body, context, services)


def _target(given: dict[str, Any], services: Services) -> Target:
    if "input" in given:
        if services.resolved.task == "classify":
            return classify.ClassifyRequest, classify.classify
        return embeddings.EmbeddingRequest, embeddings.embeddings
    for names, target in TARGETS:
        if all(name in given for name in names):
            return target
    raise ApiError(400, "the body fits no route; send messages, prompt, input, text, or query and documents")


class SageMakerRoutes(HttpExtension):
    """The HTTP extension `sagemaker`."""

    def make_routers(self) -> tuple[ApiRouter, ...]:
        return (router, public_router)
