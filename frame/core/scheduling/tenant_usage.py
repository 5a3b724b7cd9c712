"""`TenantUsage`: what each tenant has running and how much was computed for it, and whose turn is next.

Used by the waiting queue and the step planner. A tenant is the owner part of a request's namespace (`Request.tenant`); a server
without keys has one, and then nothing here is asked. Knows no policy and no queue.

The token counters are those of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): a tenant that comes anew starts
at the least counter of those that are there, so that no tenant saves up service while it is away.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class TenantUsage:
    """One a scheduler. Entries are kept while a tenant has requests. `num_running` counts requests on the device, by tenant."""

    def __init__(self, num_running: Counter[str] | None = None) -> None:
        self.num_running: Counter[str] = Counter() if num_running is None else num_running
        self._num_alive: Counter[str] = Counter()  # waiting and running
        self._served: dict[str, float] = {}  # prompt tokens computed, from where the tenant began

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have requests."""
        return len(self._served) > 1

    def arrive(self, tenant: str) -> None:
        """A request is there, to wait or to run."""
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._num_alive[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request has ended."""
        self._num_alive[tenant] -= 1
        if not self._num_alive[tenant]:
            del self._num_alive[tenant], self._served[tenant]

    def add_tokens(self, tenant: str, count: int) -> None:
        """Prompt tokens were computed."""
        self._served[tenant] = self.get_tokens(tenant) + count

    def get_tokens(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def count_owed(self, waiting: str, running: str) -> int:
        """How many running requests of one tenant may leave for waiting ones of another, before it has no more than that one."""
        return max(0, self.num_running[running] - self.num_running[waiting] - 1)

    def take_turns(self, queues: Iterable[Iterable[Request]]) -> Iterator[Request]:
        """The requests of several tenants' queues: next comes one of the tenant with least running, those that came before counted."""
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
