"""`TenantUsage`: running requests and computed prompt tokens of each tenant, for fair sharing.

Used by the waiting queue and the step planner. A tenant is `Request.tenant`; with one tenant, fair
sharing is off. Token counters follow Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024: a new tenant starts at the lowest counter, so that an absent one accumulates no credit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


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
