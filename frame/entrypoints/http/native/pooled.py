"""What the routes of models that embed or classify share: common fields, and prompts to vectors. Knows no dialect's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.request_options import RequestOptions

if TYPE_CHECKING:
    from frame.core.interfaces.model import Task
    from frame.entrypoints.http.services import Caller, Prompt, Services

MAX_INPUTS = 2048  # of one request
NOTHING_SAMPLED = SamplingParams(max_tokens=1)


class PooledRequest(RequestOptions):
    """`truncate_prompt_tokens` cuts longer texts to so many tokens; -1: to what the model takes."""

    model: str = ""
    user: str | None = None
    truncate_prompt_tokens: int | None = None

    def longest(self, services: Services) -> int | None:
        """Where texts are cut. Raises ApiError."""
        asked, most = self.truncate_prompt_tokens, services.client.limits.longest_input
        if asked is None:
            return None
        if asked == 0 or asked < -1 or asked > most:
            sentence = f"truncate_prompt_tokens is {asked}; it must be from 1 to {most}, or -1 for {most}"
            raise ApiError(400, sentence, "truncate_prompt_tokens")
        return most if asked == -1 else asked


def check_count(count: int, name: str) -> None:
    """Raise ApiError unless there are some inputs, and not too many."""
    if not count:
        raise ApiError(400, f"{name} is empty; send at least one", name)
    if count > MAX_INPUTS:
        raise ApiError(400, f"{name} has {count} entries; send at most {MAX_INPUTS} at once", name)


async def vectors_of(
    context: Caller, services: Services, request: PooledRequest, prompts: Sequence[Prompt], tasks: Sequence[Task], prefix: str = ""
) -> tuple[np.ndarray, int]:
    """(float32 [prompts, width], prompt tokens). Raises ApiError; a client that hangs up ends the work."""
    services.check_model(request.model)
    services.need_task(*tasks)
    answer = await services.begin(
        context,
        prompts,
        [NOTHING_SAMPLED] * len(prompts),
        request,
        tasks=tasks,
        longest=request.longest(services),
        prefix=prefix,
    )
    try:
        sequences = await services.complete(answer)
        if len(answer.vectors) < len(sequences):
            raise ApiError(503, "the request was aborted before its vectors were made; send it again", code="aborted")
        vectors = np.frombuffer(b"".join(answer.vectors[s.index] for s in sequences), "<f4").reshape(len(sequences), -1)
        return vectors, sum(len(s.prompt) for s in sequences)
    finally:
        services.client.abandon(answer)


def usage(num_tokens: int) -> dict[str, int]:
    """OpenAI's usage object of an answer without tokens."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
