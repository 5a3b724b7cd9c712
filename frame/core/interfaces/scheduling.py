"""Which waiting request goes first, and which running one gives way (`scheduling_policy/1`). Pure, tensor-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request

API = "scheduling_policy/1"
PATIENCE = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What a policy may know of the moment: budgets, pages, clock (seconds, monotonic)."""

    now: float
    num_running: int
    token_budget: int
    free_pages: int
    evictable_pages: int
    page_size: int


class SchedulingPolicy(ABC):
    """Orders waiting requests and names who is preempted.

    Laws: `order` returns a permutation of `waiting` (or a lazily computed prefix of one: the scheduler stops reading when the budget
    is spent) and changes nothing; `victim` never names the oldest running request (progress guarantee).
    Where `order` raises, or returns no requests, what waits keeps its order for that step; where `victim` does, or names one that it may
    not, the newest gives way; where `preempts` does, nobody is pushed off. The policy is named in the log.
    A policy whose record has `options` is constructed with them as its one argument.
    A policy with `needs_matches` finds each candidate's `request.match` (its cached prefix) filled in.
    `waiting` is a bounded window of the head of the queue (the oldest; with `by_priority` those of highest priority), so that
    10,000 queued cost no more than 100: a policy must not assume that it sees all.
    """

    needs_matches: ClassVar[bool] = False
    by_priority: ClassVar[bool] = False  # the queue is kept by `request.priority` (higher first), then by arrival

    @abstractmethod
    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]: ...

    def victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        """Whom to retract when pages run out; `running` is oldest first. The newest by default."""
        return running[-1] if len(running) > 1 else None

    def preempts(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting` may push `running` off the device."""
        return False


def late_first(ordered: Sequence[Request], view: SchedulerView) -> list[Request]:
    """Ageing for policies whose order may pass a request over again and again: who has waited longer than `PATIENCE` goes first, the
    oldest before the others; the rest keeps its order."""
    late = [request for request in ordered if view.now - request.arrival > PATIENCE]
    if not late:
        return list(ordered)
    return sorted(late, key=lambda request: request.index) + [r for r in ordered if view.now - r.arrival <= PATIENCE]
