"""`Request`: one sequence from arrival to end, with all that is needed to resume it after a
preemption.

Used by every part of the scheduler; policies read it as `SchedulableRequest`. Holds no tensor and
no page: while a request runs, its counters are arrays by slot in
`frame.core.scheduling.request_slots`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from frame.core.interfaces.batch import PromptLogprobs
from frame.core.interfaces.cache import Match
from frame.core.interfaces.kv_tier import KVTransfer
from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.sampling import Grammar
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, SessionPin


def timed_out(seconds: float) -> Finish:
    """How a request ends when its deadline has passed; it had `seconds` from its arrival."""
    sentence = f"deadline exceeded: the request took longer than its {seconds:g} s; allow it more time"
    return Finish("error", error=sentence, code="deadline_exceeded")


def queue_full(reason: str) -> Finish:
    """How a request ends that cannot be taken now, and may be sent again later."""
    return Finish("error", error=f"queue full: {reason}; try again later", code="queue_full")


class RequestStatus(IntEnum):
    """Where a request is. One that is preempted, or held for a slow grammar call, is WAITING."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the scheduler (vLLM: `Request`). Two requests are equal only if they are the
    same object."""

    rid: str
    prompt: np.ndarray  # int32 [prompt_len]
    params: SamplingParams
    seed: int
    index: int  # position in the order of arrival
    arrival: float  # seconds, monotonic
    deadline: float  # seconds, monotonic
    max_num_tokens: int  # most tokens of prompt and output together
    stop_ids: tuple[int, ...] = ()  # token ids that end the request
    priority: int = 0  # higher first
    namespace: str = ""  # of the prefix cache
    # That of the present weights, while its KV is of earlier ones, and nothing of it is cached; ""
    # otherwise
    next_namespace: str = ""
    tenant: str = ""  # the owner of the namespace
    is_further: bool = False  # not the first sequence of its request
    grammar: Grammar | None = None
    grammar_state: Any = None  # of `grammar`, between steps; the calls of grammars create and read it
    # Committed output tokens. While the request runs, the last ones are in
    # `SlotArrays.token_buffer`; they are moved here before a policy sees the request and when the
    # request leaves the device.
    output: array[int] = field(default_factory=lambda: array("i"))
    state: RequestStatus = RequestStatus.WAITING
    slot: int = -1  # while running
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # int32; all_tokens() at the last admission or jump
    unreported: list[int] = field(default_factory=list)  # the end of `output` that was not sent yet: tokens that a grammar forced
    match: Match | None = None  # the cached prefix; set while a policy that needs matches orders the queue, and during admission
    branch: int = 0  # of models with states: tokens at the last admission that were cached, perhaps without a state
    handle: Any = None  # the prefix cache's lock, while running
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache at the first admission; -1: not admitted yet
    is_reported: bool = False  # some of its tokens were sent
    num_preemptions: int = 0
    trace: str = ""  # W3C traceparent; "" if the request is not traced
    first_token_at: float = 0.0  # seconds, monotonic; 0: not yet
    admitted_at: float = 0.0  # seconds, monotonic; the first admission; 0: not yet
    second_text_start: int = 0  # index of the first token of a pair's second text; 0: one text
    adapter: str = ""  # digest; "": none
    adapter_start: int = 0  # first token for which the adapter is active
    adapter_key: int = 0  # of that token with the adapter, in place of its id in the prefix cache; 0: no adapter
    adapter_place: int = -1  # while running
    media: list[MediaItem] = field(default_factory=list)
    media_layout: Any = None  # where they are in the prompt; `RequestMedia` creates and reads it
    prompt_keys: np.ndarray | None = None  # int32 [prompt_len]; `prompt` with the cache keys of placeholders; None: it has none
    position_offset: int = 0  # see `SlotSetup`
    transfer: KVTransfer | None = None  # of the prompt's blocks, until it has begun or is not needed
    pin: SessionPin | None = None
    cached_tiers: dict[str, int] = field(default_factory=dict)  # prompt tokens that were loaded, by tier
    wants_prompt_logprobs: bool = False  # they, or the hidden states of the prompt, are still to be sent
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # one entry for each computed chunk of the prompt
    hidden_states: list[np.ndarray] = field(default_factory=list)  # the same, float32 [tokens, hidden_size]

    @property
    def prompt_len(self) -> int:
        return int(self.prompt.shape[0])

    @property
    def output_len(self) -> int:
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_new_tokens(self) -> int:
        """Most output tokens of the request."""
        return self.max_num_tokens - len(self.prompt)

    def cache_keys(self, tokens: np.ndarray) -> np.ndarray:
        """What the prefix cache knows the first tokens of the request by: `content_keys`, with the
        adapter in place of the first token that it changes."""
        if not self.adapter_key or len(tokens) <= self.adapter_start:
            return self.content_keys(tokens)
        keys = self.content_keys(tokens, copy=True)
        keys[self.adapter_start] = self.adapter_key
        return keys

    def content_keys(self, tokens: np.ndarray, *, copy: bool = False) -> np.ndarray:
        """The first tokens of the request, int32, with the cache key of its item in place of each
        placeholder: equal keys are equal content. copy: the result is not `tokens`."""
        keys = self.prompt_keys
        if keys is None:
            return tokens.copy() if copy else tokens
        return np.concatenate((keys[: len(tokens)], tokens[len(keys) :]))

    def all_tokens(self) -> np.ndarray:
        """Prompt and output so far, int32; the prompt itself, not a copy, if there is no output."""
        if not self.output:
            return self.prompt
        return np.concatenate((self.prompt, np.array(self.output, np.int32)))
