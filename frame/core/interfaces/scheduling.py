"""The interface of scheduling policies: order of waiting requests, choice of preempted ones
(kind `scheduling_policy`). Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.cache import Match
from frame.core.interfaces.sampling_params import SamplingParams

PATIENCE = 10.0  # seconds of waiting after which `late_first` puts a request first


@dataclass(frozen=True, slots=True)
class SchedulingContext:
    """The limits of the scheduler that a policy is built for."""

    max_running_requests: int
    token_budget: int  # prompt tokens of a step
    max_context: int  # tokens of a sequence, prompt and output
    page_size: int  # tokens
    num_pages: int  # of the KV cache


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The state of the scheduler that a policy may read."""

    now: float  # seconds, monotonic
    num_running: int
    token_budget: int  # prompt tokens of a step
    free_pages: int
    evictable_pages: int  # pages of the prefix cache that no request uses
    page_size: int  # tokens


class SchedulableRequest(Protocol):
    """What a policy may read of a request, waiting or running. It changes nothing."""

    rid: str
    prompt: np.ndarray  # int32 [prompt_len]
    output: array[int]  # output tokens so far
    params: SamplingParams
    index: int  # position in the order of arrival
    arrival: float  # seconds, monotonic
    deadline: float  # seconds, monotonic
    max_num_tokens: int  # most tokens of prompt and output together
    priority: int  # higher first
    namespace: str  # of the prefix cache
    tenant: str  # the owner of the namespace
    match: Match | None  # the cached prefix; see `SchedulingPolicy.needs_matches`
    num_cached_tokens: int  # prompt tokens found in the prefix cache at the first admission; -1: not admitted yet
    num_preemptions: int

    @property
    def prompt_len(self) -> int: ...

    @property
    def output_len(self) -> int: ...

    @property
    def max_new_tokens(self) -> int:
        """Most output tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""

    def all_tokens(self) -> np.ndarray:
        """Prompt and output so far, int32."""


class SchedulingPolicy(ABC):
    """Orders waiting requests and selects the requests to preempt.

    Contract: `sort_waiting` returns a permutation of `waiting`, or a lazy prefix of one that fills
    `view.token_budget`; it changes nothing, and takes the time of a sort. `select_victim` never
    returns the oldest running request (progress guarantee). Where `sort_waiting` raises or returns
    no requests, waiting requests keep their order in that step. Where `select_victim` raises or
    returns a request that it may not, the newest is preempted. Where `can_preempt` raises, no
    request is preempted. The log names the policy. `waiting` is a bounded window of the head of the
    queue (the oldest; with `by_priority` those of highest priority): a policy must not assume that
    it sees all. It remembers no request by its address, and what it remembers is bounded, also
    where each request has another tenant."""

    needs_matches: ClassVar[bool] = False  # `request.match`, the cached prefix, is set before `sort_waiting`
    by_priority: ClassVar[bool] = False  # the queue is sorted by `request.priority` (higher first), then by arrival

    def __init__(self, context: SchedulingContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]: ...

    def select_victim(self, running: Sequence[SchedulableRequest], view: SchedulerView) -> SchedulableRequest | None:
        """The request to preempt when pages run out; `running` is oldest first. By default the
        newest. None: none."""
        return running[-1] if len(running) > 1 else None

    def can_preempt(self, waiting: SchedulableRequest, running: SchedulableRequest) -> bool:
        """Whether `running` may be preempted for `waiting`."""
        return False


def late_first(ordered: Sequence[SchedulableRequest], view: SchedulerView) -> list[SchedulableRequest]:
    """Ageing, for policies whose order may starve a request: requests that waited longer than
    `PATIENCE` come first, the oldest before the others. The rest keeps its order."""
    late = [request for request in ordered if view.now - request.arrival > PATIENCE]
    if not late:
        return list(ordered)
    return sorted(late, key=lambda request: request.index) + [r for r in ordered if view.now - r.arrival <= PATIENCE]
