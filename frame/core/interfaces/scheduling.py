"""The interface of scheduling policies: order of waiting requests, choice of preempted ones
(kind `scheduling_policy`). Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.scheduling.request import Request

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


class SchedulingPolicy(ABC):
    """Orders waiting requests and selects the requests to preempt.

    Contract: `sort_waiting` returns a permutation of `waiting`, or a lazy prefix of one, of which
    the scheduler reads as much as the budget allows; it changes nothing. `select_victim` never
    returns the oldest running request (progress guarantee). Where `sort_waiting` raises or returns
    no requests, waiting requests keep their order in that step. Where `select_victim` raises or
    returns a request that it may not, the newest is preempted. Where `can_preempt` raises, no
    request is preempted. The log names the policy. `waiting` is a bounded window of the head of the
    queue (the oldest; with `by_priority` those of highest priority), so that 10,000 queued requests
    cost no more than 100: a policy must not assume that it sees all."""

    needs_matches: ClassVar[bool] = False  # `request.match`, the cached prefix, is set before `sort_waiting`
    by_priority: ClassVar[bool] = False  # the queue is sorted by `request.priority` (higher first), then by arrival

    def __init__(self, context: SchedulingContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]: ...

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        """The request to preempt when pages run out; `running` is oldest first. By default the
        newest. None: none."""
        return running[-1] if len(running) > 1 else None

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether `running` may be preempted for `waiting`."""
        return False


def late_first(ordered: Sequence[Request], view: SchedulerView) -> list[Request]:
    """Ageing, for policies whose order may starve a request: requests that waited longer than
    `PATIENCE` come first, the oldest before the others. The rest keeps its order."""
    late = [request for request in ordered if view.now - request.arrival > PATIENCE]
    if not late:
        return list(ordered)
    return sorted(late, key=lambda request: request.index) + [r for r in ordered if view.now - r.arrival <= PATIENCE]
