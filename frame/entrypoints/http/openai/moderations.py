"""The route `/v1/moderations` of the OpenAI API, with a classifier or a language model.

The labels of a classifier are the categories. A language model gets `text.moderation_policy` as its
system message and the text as the user message, and writes `safe`, or `unsafe` and on the next line
the categories. Must not depend on the engine.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.http.chat.request_media import Chat
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.native.pooling import PoolingRequestFields, check_count, compute_vectors, get_labels
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_starter import Caller, RequestPlan, start_request, wait_complete
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.moderation import CATEGORIES, instructions, verdict_form
from frame.entrypoints.relevance import finished

router = ApiRouter(access=Access.USER)

THRESHOLD = 0.5  # score from which a category is flagged
VERDICT_TOKENS = 128  # max_tokens of a verdict
HARMLESS = frozenset({"safe", "ok", "neutral", "normal", "none", "benign", "clean", "nontoxic", "nothate", "nonhate", "nothateful"})

Moderation = declare(
    "Moderation",
    "flagged category_scores",
    categories=dict[str, bool],
    category_applied_input_types=dict[str, list[Literal["text"]]],
)
ModerationList = declare("ModerationList", "id model", results=array(Moderation))


class Part(RequestBody):
    """A part of one input. Only the type `text` is supported."""

    type: str
    text: str | None = None


class ModerationRequest(PoolingRequestFields):
    input: str | list[str | Part]


@router.post("/v1/moderations", responses=responds_with(ModerationList))
async def moderations(request: ModerationRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Classify texts by the categories of the policy."""
    results = [_result(scores) for scores in await moderate_texts(context, services, request)]
    return {"id": f"modr-{uuid.uuid4().hex}", "model": services.resolved.served_name, "results": results}


async def moderate_texts(context: Caller, services: Services, request: ModerationRequest) -> list[dict[str, float]]:
    """For each input, category -> score. Categories that a language model did not name are missing.
    Raises ApiError."""
    texts = _texts(request)
    if services.resolved.task == "classify":
        return await _classified(context, services, request, texts)
    services.check_model(request.model, context.tenant)
    services.need_task("generate", "classify")
    return await _judged_by_policy(context, services, request, texts)


def _texts(request: ModerationRequest) -> list[str]:
    """The inputs as texts; all parts together are one, as in OpenAI's API. Raises ApiError."""
    if isinstance(request.input, str):
        return [request.input]
    check_count(len(request.input), "input")
    texts = [one for one in request.input if isinstance(one, str)]
    parts = [one for one in request.input if isinstance(one, Part)]
    if texts and parts:
        raise ApiError(400, "input mixes texts and parts; send one kind", "input")
    for part in parts:
        if part.type != "text" or part.text is None:
            raise ApiError(400, f"a part of input is of type {quoted(part.type)}; this model takes text only", "input")
    return texts or ["\n".join(part.text or "" for part in parts)]


async def _classified(context: Caller, services: Services, request: ModerationRequest, texts: Sequence[str]) -> list[dict[str, float]]:
    """The scores of a classifier. Each label is a category, except those of `HARMLESS`."""
    logits, _ = await compute_vectors(context, services, request, texts, ("classify",))
    names = get_labels(services)
    return [
        {name: score for name, score in zip(names, row, strict=True) if re.sub(r"[\W_]", "", name.lower()) not in HARMLESS}
        for row in finished(logits, services.resolved.pooling).tolist()
    ]


async def _judged_by_policy(
    context: Caller, services: Services, request: ModerationRequest, texts: Sequence[str]
) -> list[dict[str, float]]:
    """The scores of a language model, whose output a grammar constrains where a backend is
    configured."""
    if services.moderation_policy is None:
        sentence = "this server has no moderation policy; start it with --moderation-policy default, or a file, or serve a classifier"
        raise ApiError(400, sentence, "model")
    system = instructions(services.moderation_policy)
    chats = [Chat([{"role": "system", "content": system}, {"role": "user", "content": text}]) for text in texts]
    regex = verdict_form(services.moderation_policy) if services.client.limits.grammar else None
    params = SamplingParams(max_tokens=VERDICT_TOKENS, temperature=0.0, logprobs=0, regex=regex)
    state = await start_request(context, services, RequestPlan(chats, [params] * len(chats), request))
    return [_verdict(sequence) for sequence in await wait_complete(state)]


def _verdict(sequence: SequenceState) -> dict[str, float]:
    """The scores of a verdict: the probability of its first token."""
    text, _, logprobs = sequence.take_output()
    word, _, rest = text.strip().partition("\n")
    chance = math.exp(min(0.0, logprobs[0].logprobs[0] or 0.0)) if logprobs and logprobs[0].logprobs else 1.0
    if word.strip().lower() not in ("safe", "unsafe"):
        raise ApiError(500, f"the policy model wrote {text[:80]!r}, which is no verdict; use another model, or a grammar backend")
    if word.strip().lower() == "safe":
        return {}
    names = rest.split(",")
    if sequence.finish is not None and sequence.finish.reason == "length":
        names.pop()  # the last one was cut off
    named = {name.strip().lower() for name in names} - {""}
    return {name: max(chance, THRESHOLD) for name in named or {"other"}}


def is_flagged(score: float) -> bool:
    """Whether a category with this score is flagged."""
    return score >= THRESHOLD


def _result(scores: dict[str, float]) -> dict[str, Any]:
    """OpenAI's result object, with OpenAI's categories and the model's own."""
    every = dict.fromkeys(CATEGORIES, 0.0) | scores
    flags = {name: is_flagged(score) for name, score in every.items()}
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": every,
        "category_applied_input_types": {name: ["text"] for name in every},
    }
