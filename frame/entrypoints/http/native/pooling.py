"""Requests of pooling models: the fields that they share, and the computation of vectors from
prompts.

Used by all routes that embed, classify, score or rerank. Must not depend on a response shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from frame.core.interfaces.model import Task
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import aborted
from frame.entrypoints.http.paced_json import INLINE_VALUES, Entries, PacedBody
from frame.entrypoints.http.request_options import RequestOptions
from frame.entrypoints.http.request_starter import Caller, Prompt, RequestPlan, start_request, wait_complete
from frame.entrypoints.http.services import Services

MAX_INPUTS = 2048  # of one request
CUT_FIELD = "truncate_prompt_tokens: -1"  # the remedy that sentences name for long inputs
NOTHING_SAMPLED = SamplingParams(max_tokens=1)  # pooling models sample no token


class PoolingRequestFields(RequestOptions):
    """Fields of all pooling requests. `truncate_prompt_tokens`: length in tokens to which longer
    texts are cut; -1: the model's maximum."""

    model: str = ""
    user: str | None = None
    truncate_prompt_tokens: int | None = None

    def sent_name(self, parameter: str) -> str:
        return "input" if parameter == "prompt" else parameter

    def truncate_length(self, services: Services) -> int | None:
        """Tokens to which texts are cut; None: longer ones are refused. Raises ApiError."""
        asked, maximum = self.truncate_prompt_tokens, services.client.limits.max_pooling_tokens
        if asked is None:
            return None
        if asked == 0 or asked < -1 or asked > maximum:
            sentence = f"truncate_prompt_tokens is {asked}; it must be from 1 to {maximum}, or -1 for {maximum}"
            raise ApiError(400, sentence, "truncate_prompt_tokens")
        return maximum if asked == -1 else asked


def check_count(count: int, name: str) -> None:
    """Raise ApiError 400 for no inputs, or more than `MAX_INPUTS`."""
    if not count:
        raise ApiError(400, f"{name} is empty; send at least one", name)
    if count > MAX_INPUTS:
        raise ApiError(400, f"{name} has {count} entries; send at most {MAX_INPUTS} at once", name)


async def compute_vectors(
    context: Caller, services: Services, request: PoolingRequestFields, prompts: Sequence[Prompt], tasks: Sequence[Task], prefix: str = ""
) -> tuple[np.ndarray, int]:
    """(float32 [prompts, width], number of prompt tokens). Raises ApiError."""
    services.check_model(request.model)
    services.need_task(*tasks)
    params, max_length = [NOTHING_SAMPLED] * len(prompts), request.truncate_length(services)
    plan = RequestPlan(prompts, params, request, tasks=tasks, max_length=max_length, prefix=prefix)
    state = await start_request(context, services, plan)
    sequences = await wait_complete(state)
    if len(state.vectors) < len(sequences):
        raise aborted()
    vectors = np.frombuffer(b"".join(state.vectors[s.index] for s in sequences), "<f4").reshape(len(sequences), -1)
    return vectors, sum(len(s.prompt) for s in sequences)


def list_reply(
    services: Services, rid: str, data: Iterable[dict[str, Any]], num_tokens: int, num_values: int, more: dict[str, Any] | None = None
) -> Any:
    """The response of a route with one entry for each input, in OpenAI's shape. `num_values`: the
    numbers in all of `data`."""
    head = {"id": rid, "object": "list", "created": int(time.time()), "model": services.resolved.served_name}
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
