"""`WaitingQueue`: waiting requests in order (vLLM: `Scheduler.waiting`); `TenantUsage`: what each
tenant uses, for fair sharing; `Deadlines`: when requests time out.

Used by the scheduler and the step planner. Of scheduling policies it knows only the flag
`by_priority`. A tenant is `Request.tenant`; with one tenant, fair sharing is off. Token counters
follow Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: a new tenant starts at
the lowest counter, so that an absent one accumulates no credit.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest

from frame.core.scheduling.request import Request, RequestStatus


class TenantUsage:
    """One for each scheduler. Entries exist while a tenant has requests. `num_running`: requests on
    the device, by tenant."""

    def __init__(self, num_running: Counter[str] | None = None) -> None:
        self.num_running: Counter[str] = Counter() if num_running is None else num_running
        self._num_alive: Counter[str] = Counter()  # waiting and running
        self._served: dict[str, float] = {}  # prompt tokens computed, plus the counter at which the tenant started

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have requests."""
        return len(self._served) > 1

    def add_request(self, tenant: str) -> None:
        """Count a request that arrived."""
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._num_alive[tenant] += 1

    def remove_request(self, tenant: str) -> None:
        """Count a request that ended."""
        self._num_alive[tenant] -= 1
        if not self._num_alive[tenant]:
            del self._num_alive[tenant], self._served[tenant]

    def add_tokens(self, tenant: str, count: int) -> None:
        """Count prompt tokens that are computed for a tenant."""
        self._served[tenant] = self.get_tokens(tenant) + count

    def get_tokens(self, tenant: str) -> float:
        """The tenant's token counter; 0 for an unknown tenant."""
        return self._served.get(tenant, 0.0)

    def count_excess(self, waiting: str, running: str) -> int:
        """How many requests of the tenant `running` may be preempted for the tenant `waiting` until
        it has at most one more than that."""
        return max(0, self.num_running[running] - self.num_running[waiting] - 1)

    def interleave_tenants(self, queues: Iterable[Iterable[Request]]) -> Iterator[Request]:
        """Merge the tenants' queues: next comes a request of the tenant with the fewest running
        requests, those yielded before included."""
        turns = []
        for queue in queues:
            requests = iter(queue)
            first = next(requests)
            turns.append((self.num_running[first.tenant], self.get_tokens(first.tenant), first.tenant, first, requests))
        heapq.heapify(turns)
        while turns:
            running, served, tenant, request, requests = turns[0]
            yield request
            following = next(requests, None)
            if following is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (running + 1, served, tenant, following, requests))


class TenantQueue:
    """Waiting requests of one tenant and priority, by rid. Of a request with several sequences, all
    but the first take turns with other requests, so that many of them do not delay later ones."""

    def __init__(self) -> None:
        self._sequences: tuple[OrderedDict[str, Request], ...] = (OrderedDict(), OrderedDict())  # the second: further ones
        self._next = 0  # whose turn it is: an index of `_sequences`

    def __bool__(self) -> bool:
        return any(self._sequences)

    def __iter__(self) -> Iterator[Request]:
        some, others = (self._sequences[number].values() for number in (self._next, 1 - self._next))
        if not (some and others):
            return iter(some or others)
        return (request for turn in zip_longest(some, others) for request in turn if request is not None)

    def push(self, request: Request) -> None:
        self._sequences[request.is_further].setdefault(request.rid, request)

    def push_front(self, request: Request) -> None:
        self.push(request)
        self._sequences[request.is_further].move_to_end(request.rid, last=False)

    def remove(self, request: Request) -> None:
        del self._sequences[request.is_further][request.rid]
        self._next = 1 - request.is_further


class WaitingQueue:
    """First come, first served, or by priority (higher first) and then by arrival; O(1) to add and
    to remove.

    Requests of one priority are interleaved by tenant (`usage`), so that one tenant's many requests
    delay only its own. A preempted request returns to the head of its priority and tenant.
    """

    def __init__(self, by_priority: bool = False, usage: TenantUsage | None = None) -> None:
        self.usage = usage or TenantUsage()
        self._by_priority = by_priority
        self._levels: dict[int, dict[str, TenantQueue]] = {}  # by tenant
        self._order: list[int] = []  # the levels' priorities, negated, ascending
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for negated in self._order:
            level = self._levels[-negated]
            yield from next(iter(level.values())) if len(level) == 1 else self.usage.interleave_tenants(level.values())

    def push(self, request: Request) -> None:
        self._queue(request).push(request)
        self._size += 1

    def push_front(self, request: Request) -> None:
        self._queue(request).push_front(request)
        self._size += 1

    def remove(self, request: Request) -> None:
        priority, tenant = self._priority(request), request.tenant
        level = self._levels[priority]
        level[tenant].remove(request)
        self._size -= 1
        if not level[tenant]:
            del level[tenant]
        if not level:
            del self._levels[priority]
            del self._order[bisect_left(self._order, -priority)]

    def head(self, count: int) -> list[Request]:
        """The first `count` requests, in order."""
        return list(islice(self, count))

    def _priority(self, request: Request) -> int:
        return request.priority if self._by_priority else 0

    def _queue(self, request: Request) -> TenantQueue:
        priority = self._priority(request)
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = {}
            insort(self._order, -priority)
        return level.setdefault(request.tenant, TenantQueue())


class Deadlines:
    """A heap of deadlines. Entries of ended requests are skipped when they are popped, and removed
    when they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add_request(self, request: Request, num_alive: int) -> None:
        """Add a request; `num_alive`: how many requests the scheduler has in all."""
        heapq.heappush(self._heap, (request.deadline, request.index, request))
        if len(self._heap) > 2 * num_alive + 64:
            self._heap = [entry for entry in self._heap if entry[2].state != RequestStatus.FINISHED]
            heapq.heapify(self._heap)

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.state != RequestStatus.FINISHED:
                late.append(request)
        return late
