"""`return_hidden_states`: the hidden states of the last layer, of a request's prompt and output.

They are computed after the output, by one pass over all tokens of a sequence. Decodes run as those
of other requests: in graphs, with drafts and with grammars. Used by the routes that generate. Must
not depend on the shape of a response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.limits import STATES_OF_TOKENS, check_num_states, count_output_room
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.request_media import list_media
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.request_body import RequestOptions
from frame.entrypoints.http.request_starter import Caller, Prompt, RequestPlan, start_request, wait_complete
from frame.entrypoints.http.services import Services

FIELD = "return_hidden_states"
Refine = Callable[[list[int], SamplingParams], SamplingParams]

# What the second pass does not take from the request.
_OF_FIRST_PASS = frozenset({
    "rid", "request_id", "session_id", "prompt_cache_key", "prompt_cache_retention", "cache_control", "truncate_prompt_tokens",
    "stream",
})  # fmt: skip


def bound_states(services: Services, prompts: Sequence[Prompt], refine: Refine | None = None) -> Refine:
    """`refine` of a request that returns hidden states, which checks their size before anything is
    computed. Raises ApiError 400 for media."""
    if any(list_media(prompt) for prompt in prompts):
        raise ApiError(400, f"{FIELD} is not supported with images, video or audio; leave it out", FIELD)
    limits, total = services.client.limits, 0

    def check(prompt: list[int], params: SamplingParams) -> SamplingParams:
        nonlocal total
        num_output = 0 if limits.is_pooling else (params.max_tokens or count_output_room(limits, prompt)) - 1
        total += params.n * (len(prompt) + num_output)
        check_num_states(limits, total)
        return params if refine is None else refine(prompt, params)

    return check


async def compute_states(call: Caller, services: Services, options: RequestOptions, state: RequestState) -> list[np.ndarray]:
    """The hidden states of each sequence of a finished request, float32 [tokens, hidden_size]: of
    its prompt, and of its output but the last token, which the model has not read. Raises
    ApiError."""
    changes: dict[str, Any] = dict.fromkeys(_OF_FIRST_PASS & type(options).model_fields.keys())
    if options.timeout is not None:
        changes["timeout"] = max(1e-3, options.timeout - (time.perf_counter() - state.created))
    if isinstance(options.lora_path, list):
        changes["lora_path"] = [options.lora_path[sequence.prompt_index] for sequence in state.sequences]
    prompts = [sequence.prompt + sequence.recovery.output_ids[:-1].tolist() for sequence in state.sequences]
    params = [STATES_OF_TOKENS] * len(prompts)
    second = await start_request(call, services, RequestPlan(prompts, params, options.model_copy(update=changes), prefix="states-"))
    await wait_complete(second)
    return [read_states(second.vectors.get(sequence.index), services) for sequence in second.sequences]


def read_states(data: bytes | None, services: Services) -> np.ndarray:
    """The hidden states that the engine has sent, float32 [tokens, hidden_size]. Raises ApiError
    503 without them."""
    if data is None:
        raise ApiError(503, "the request was aborted before its hidden states were computed; send it again")
    return np.frombuffer(data, "<f4").reshape(-1, services.resolved.model.hidden_size)


def last_state(sequence: SequenceState, states: np.ndarray) -> list[float]:
    """What chats and completions return of a sequence's states, as SGLang does: that of the last
    token that the model read; nothing where it read the prompt alone."""
    state: list[float] = states[-1].tolist() if len(states) > len(sequence.prompt) else []
    return state
