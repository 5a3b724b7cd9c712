"""Scheduling policies with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy, late_first
from tests.testing.mutants import MutantList

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class ShortestFirst(SchedulingPolicy):
    """Shortest prompt first, with ageing."""

    def __init__(self, *_: Any) -> None:
        super().__init__(*_)

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return late_first(sorted(waiting, key=lambda request: request.prompt_len), view)


mutant = MUTANTS = MutantList("scheduling_policy", reference=ShortestFirst)


@mutant
class DropsTheLast(ShortestFirst):
    """Leaves the last request out of the order."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return list(super().sort_waiting(waiting, view))[:-1]


@mutant
class RepeatsTheFirst(ShortestFirst):
    """Returns the first request twice and the last not at all."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        ordered = list(super().sort_waiting(waiting, view))
        return [*ordered[:1], *ordered[:-1]]


@mutant
class RemembersTheOrder(ShortestFirst):
    """Returns the order of an earlier window if the new one is as long."""

    def __init__(self, *_: Any) -> None:
        super().__init__(*_)
        self.orders: dict[int, list[Request]] = {}

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        if len(waiting) not in self.orders:
            self.orders[len(waiting)] = list(super().sort_waiting(waiting, view))
        return self.orders[len(waiting)]


@mutant
class SortsInPlace(ShortestFirst):
    """Sorts the sequence that it was given."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        waiting.sort(key=lambda request: request.prompt_len)  # type: ignore[attr-defined]
        return late_first(waiting, view)


@mutant
class RaisesPriorities(ShortestFirst):
    """Ages requests by raising their priority in each step."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        for request in waiting:
            request.priority += 1
        return sorted(waiting, key=lambda request: -request.priority)


@mutant
class ForgetsMatches(ShortestFirst):
    """Clears the cached prefixes of the requests to save memory."""

    needs_matches: ClassVar[bool] = True

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        for request in waiting:
            request.match = None
        return super().sort_waiting(waiting, view)


@mutant
class NeedsARequest(ShortestFirst):
    """Fails when no request waits."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return [waiting[0], *waiting[1:]]


@mutant
class ShortestWithoutAgeing(ShortestFirst):
    """Orders by prompt length without ageing, so that long prompts starve."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return sorted(waiting, key=lambda request: request.prompt_len)


@mutant
class NewestFirst(ShortestFirst):
    """Serves the newest request first."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return reversed(waiting)


@mutant
class AgesTheWrongWay(ShortestFirst):
    """Puts requests that waited long last, because a sign is wrong."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return sorted(waiting, key=lambda request: (view.now - request.arrival > 10, request.prompt_len))


@mutant
class CachedPrefixesFirst(ShortestFirst):
    """Prefers cached prefixes without ageing, so that requests without one starve."""

    needs_matches: ClassVar[bool] = True

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return sorted(waiting, key=lambda request: -request.match.num_tokens if request.match is not None else 0)


@mutant
class ExpectsMatches(ShortestFirst):
    """Reads the cached prefix of requests that have none."""

    needs_matches: ClassVar[bool] = True

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return late_first(sorted(waiting, key=lambda request: -request.match.num_tokens), view)  # type: ignore[union-attr]


@mutant
class DividesByFreePages(ShortestFirst):
    """Divides by the number of free pages, which may be 0."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return late_first(sorted(waiting, key=lambda request: request.prompt_len / view.free_pages), view)


@mutant
class AsksAService(ShortestFirst):
    """Waits for another program while the step waits for the order."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        time.sleep(0.03)
        return super().sort_waiting(waiting, view)


@mutant
class CountsPairs(ShortestFirst):
    """Compares each request with all others, many times."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        lengths = [request.prompt_len for request in waiting]
        rank = {id(r): sum(r.prompt_len > a for a in lengths for _ in range(32)) for r in waiting}
        return late_first(sorted(waiting, key=lambda request: rank[id(request)]), view)


@mutant
class KeepsRequests(ShortestFirst):
    """Keeps each request that it has seen, by its id, and never removes one."""

    def __init__(self, *_: Any) -> None:
        super().__init__(*_)
        self.seen: dict[str, float] = {}

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        for request in waiting:
            self.seen.setdefault(request.rid, view.now)
        return super().sort_waiting(waiting, view)


@mutant
class SharesAHistory(ShortestFirst):
    """Keeps the ids of victims in a list of the class, without a bound."""

    victims: ClassVar[list[Any]] = []

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        self.victims.append(running[-1].rid)
        return super().select_victim(running, view)


@mutant
class PreemptsTheOldest(ShortestFirst):
    """Preempts the oldest request, which has computed the most."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        return running[0] if len(running) > 1 else None


@mutant
class PreemptsTheLongest(ShortestFirst):
    """Preempts the longest request, which may be the oldest."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        return max(running, key=lambda request: request.num_tokens) if len(running) > 1 else None


@mutant
class PreemptsNone(ShortestFirst):
    """Names no victim when pages run out."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        return None


@mutant
class ExpectsTwo(ShortestFirst):
    """Fails when one request runs."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        return (running[1], *running[2:])[-1]


@mutant
class PreemptsACopy(ShortestFirst):
    """Returns a copy of the victim instead of the request."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        from copy import copy

        return copy(running[-1]) if len(running) > 1 else None


@mutant
class PreemptsEquals(ShortestFirst):
    """Lets requests of equal priority preempt each other, without end."""

    by_priority: ClassVar[bool] = True

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return sorted(waiting, key=lambda request: -request.priority)

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        return min(running[1:], key=lambda request: request.priority, default=None)

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.priority >= running.priority


@mutant
class LowPriorityFirst(PreemptsEquals):
    """Serves low priorities first, as if 0 were the most urgent."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return sorted(waiting, key=lambda request: request.priority)

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.priority > running.priority


@mutant
class PreemptsTheImportant(PreemptsEquals):
    """Preempts the request of the highest priority when pages run out."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        return max(running[1:], key=lambda request: request.priority, default=None)

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.priority > running.priority


@mutant
class MarksTheVictim(ShortestFirst):
    """Marks the victim as waiting itself, which is the scheduler's part."""

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        running[-1].num_preemptions += 1
        return super().select_victim(running, view)


@mutant
class ServesTenantsInTurn(ShortestFirst):
    """Counts the prompt tokens of each tenant for ever."""

    def __init__(self, *_: Any) -> None:
        super().__init__(*_)
        self.served: dict[str, int] = {}

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        ordered = late_first(sorted(waiting, key=lambda request: self.served.get(request.tenant, 0)), view)
        for request in ordered[:1]:
            self.served[request.tenant] = self.served.get(request.tenant, 0) + request.prompt_len
        return ordered


@mutant
class AlwaysPreemptsLongPrompts(ShortestFirst):
    """Preempts a request for each shorter one, however long it has been there."""

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.prompt_len < running.prompt_len
