"""`/v1/moderations` as OpenAI: by a classifier, whose labels are the categories, or by a language model that is asked to apply a policy.

A policy model gets `text.moderation_policy` as its system message and the text as the user's, and answers `safe`, or `unsafe` and on the
next line the categories.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.http.dependencies import ContextDep, ServicesDep
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.native.classes import labels_of
from frame.entrypoints.http.native.pooled import PooledRequest, check_count, vectors_of
from frame.entrypoints.http.protocol.access import Access
from frame.entrypoints.http.protocol.api_route import ApiRouter
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.services import Caller, Chat, Services
from frame.entrypoints.moderation import CATEGORIES, instructions, verdict_form

if TYPE_CHECKING:
    pass

router = ApiRouter(access=Access.USER)

THRESHOLD = 0.5  # the score from which a category counts as found
ANSWER_TOKENS = 128
HARMLESS = frozenset({"safe", "ok", "neutral", "normal", "none", "benign", "clean", "nontoxic", "nothate", "nonhate", "nothateful"})


class Part(RequestBody):
    """A part of one input; only text is read."""

    type: str
    text: str | None = None


class ModerationRequest(PooledRequest):
    input: str | list[str | Part]




@router.post("/v1/moderations")
async def moderations(request: ModerationRequest, context: ContextDep, services: ServicesDep) -> Any:
    """What of a policy's categories texts hold."""
    results = [_result(scores) for scores in await judged(context, services, request)]
    return {"id": f"modr-{uuid.uuid4().hex}", "model": services.resolved.served_name, "results": results}


async def judged(context: Caller, services: Services, request: ModerationRequest) -> list[dict[str, float]]:
    """Of each input, the scores of the categories that the model knows; those that it did not find may be missing. Raises ApiError."""
    texts = _texts(request)
    if services.resolved.task == "classify":
        return await _classified(context, services, request, texts)
    services.check_model(request.model)
    services.need_task("generate", "classify")
    return await _judged_by_policy(context, services, request, texts)


def _texts(request: ModerationRequest) -> list[str]:
    """The inputs. Parts are one input together, as OpenAI has it. Raises ApiError."""
    if isinstance(request.input, str):
        return [request.input]
    check_count(len(request.input), "input")
    texts = [one for one in request.input if isinstance(one, str)]
    parts = [one for one in request.input if isinstance(one, Part)]
    if texts and parts:
        raise ApiError(400, "input mixes texts and parts; send one kind", "input")
    for part in parts:
        if part.type != "text" or part.text is None:
            raise ApiError(400, f"a part of input is of type {quoted(part.type)}; this server reads text only", "input")
    return texts or ["\n".join(part.text or "" for part in parts)]


async def _classified(context: Caller, services: Services, request: ModerationRequest, texts: Sequence[str]) -> list[dict[str, float]]:
    """Each label is a category, but for those that say that nothing was found."""
    vectors, _ = await vectors_of(context, services, request, texts, ("classify",))
    names = labels_of(services)
    return [
        {name: score for name, score in zip(names, row, strict=True) if re.sub(r"[\W_]", "", name.lower()) not in HARMLESS}
        for row in vectors.tolist()
    ]


async def _judged_by_policy(
    context: Caller, services: Services, request: ModerationRequest, texts: Sequence[str]
) -> list[dict[str, float]]:
    """The verdicts of a language model, which is held to their form where there is a grammar backend."""
    if services.moderation_policy is None:
        sentence = "this model applies no policy; start the server with --moderation-policy default, or a file, or serve a classifier"
        raise ApiError(400, sentence, "model")
    system = instructions(services.moderation_policy)
    chats = [Chat([{"role": "system", "content": system}, {"role": "user", "content": text}]) for text in texts]
    regex = verdict_form(services.moderation_policy) if services.client.limits.grammar else None
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, logprobs=0, regex=regex)
    answer = await services.begin(context, chats, [params] * len(chats), request)
    try:
        return [_verdict(sequence) for sequence in await services.complete(answer)]
    finally:
        services.client.abandon(answer)


def _verdict(sequence: SequenceState) -> dict[str, float]:
    """The scores that a model's answer stands for: how sure it was of its first word."""
    text, _, logprobs = sequence.take()
    word, _, rest = text.strip().partition("\n")
    chance = math.exp(min(0.0, logprobs[0].logprobs[0] or 0.0)) if logprobs and logprobs[0].logprobs else 1.0
    if word.strip().lower() not in ("safe", "unsafe"):
        raise ApiError(500, f"the policy model answered {text[:80]!r}, which is no verdict; use another model, or a grammar backend")
    if word.strip().lower() == "safe":
        return {}
    names = rest.split(",")
    if sequence.finish is not None and sequence.finish.reason == "length":
        names.pop()  # which was cut
    named = {name.strip().lower() for name in names} - {""}
    return {name: max(chance, THRESHOLD) for name in named or {"other"}}


def is_found(score: float) -> bool:
    """Whether a category counts as found."""
    return score >= THRESHOLD


def _result(scores: dict[str, float]) -> dict[str, Any]:
    """OpenAI's categories, and what else the model knows."""
    every = dict.fromkeys(CATEGORIES, 0.0) | scores
    flags = {name: is_found(score) for name, score in every.items()}
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": every,
        "category_applied_input_types": {name: ["text"] for name in every},
    }


