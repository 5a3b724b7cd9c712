"""The routes of a SageMaker container: `/ping`, and `/invocations`, which runs the route that the
body fits. Must not depend on the engine."""

from __future__ import annotations

from typing import Any

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.native import pooling, ranking
from frame.entrypoints.http.openai import completions as openai
from frame.entrypoints.http.operations import admin
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.request_body import RequestBody, parse_body
from frame.entrypoints.http.response_types import array
from frame.entrypoints.http.services import Services

public_router = ApiRouter(access=Access.OPEN)
router = ApiRouter(access=Access.USER)

AnyBody = (
    openai.ChatCompletion | openai.Completion | ranking.Ranking | ranking.ScoreList | native.GenerateResult
    | array(native.GenerateResult) | pooling.EmbeddingList | pooling.ClassificationList
)  # fmt: skip
AnyEvent = openai.ChatCompletionChunk | openai.CompletionChunk | native.GenerateResult

public_router.get("/ping", responses=responds_with(admin.Health))(admin.ready)
public_router.post("/ping", responses=responds_with(admin.Health))(admin.ready)

Target = tuple[type[RequestBody], Any]  # a request type and its handler

# fields of a body -> its request type and the handler of its route; the first match counts
TARGETS: tuple[tuple[tuple[str, ...], Target], ...] = (
    (("messages",), (openai.ChatRequest, openai.chat_completions)),
    (("prompt",), (openai.CompletionRequest, openai.completions)),
    (("query", "documents"), (ranking.RerankRequest, ranking.rerank)),
    (("text_1", "text_2"), (ranking.ScoreRequest, ranking.score)),
    (("queries", "items"), (ranking.ScoreRequest, ranking.score)),
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


def _target(body: dict[str, Any], services: Services) -> Target:
    if "input" in body:
        if services.resolved.task == "classify":
            return pooling.ClassifyRequest, pooling.classify
        return pooling.EmbeddingRequest, pooling.embeddings
    for names, target in TARGETS:
        if all(name in body for name in names):
            return target
    raise ApiError(400, "the body fits no route; send messages, prompt, input, text, or query and documents")


SageMakerRoutes = make_extension(__name__, router, public_router)
