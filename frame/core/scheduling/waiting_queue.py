"""`WaitingQueue`: waiting requests in order (vLLM: `Scheduler.waiting`); `Deadlines`: when requests
time out.

Used by the scheduler and the step planner. Of scheduling policies it knows only the flag
`by_priority`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from frame.core.scheduling.request import Request, RequestStatus
from frame.core.scheduling.tenant_usage import TenantUsage

Level = dict[str, OrderedDict[str, Request]]  # by tenant, then by rid


class WaitingQueue:
    """First come, first served, or by priority (higher first) and then by arrival; O(1) to add and
    to remove.

    Requests of one priority are interleaved by tenant (`usage`), so that one tenant's many requests
    delay only its own. A preempted request returns to the head of its priority and tenant.
    """

    def __init__(self, by_priority: bool = False, usage: TenantUsage | None = None) -> None:
        self.usage = usage or TenantUsage()
        self._by_priority = by_priority
        self._levels: dict[int, Level] = {}
        self._order: list[int] = []  # the levels' priorities, negated, ascending
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for negated in self._order:
            level = self._levels[-negated]
            if len(level) == 1:
                yield from next(iter(level.values())).values()
            else:
                yield from self.usage.interleave_tenants(queue.values() for queue in level.values())

    def push(self, request: Request) -> None:
        self._queue(request).setdefault(request.rid, request)
        self._size += 1

    def push_front(self, request: Request) -> None:
        self.push(request)
        self._queue(request).move_to_end(request.rid, last=False)

    def remove(self, request: Request) -> None:
        priority, tenant = self._priority(request), request.tenant
        level = self._levels[priority]
        del level[tenant][request.rid]
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

    def _queue(self, request: Request) -> OrderedDict[str, Request]:
        priority = self._priority(request)
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = {}
            insort(self._order, -priority)
        return level.setdefault(request.tenant, OrderedDict())


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
