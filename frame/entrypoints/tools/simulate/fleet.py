"""`Fleet`: the replicas of a simulation behind one router, on one virtual clock.

Used by `frame simulate`, and by tests of the controller of replicas. Must not know where requests
come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import partial

from frame.entrypoints.tools.simulate.engine import VirtualEngine
from frame.entrypoints.tools.simulate.workload import Arrival
from frame.interfaces.routing import RoutingPolicy
from frame.parallel.replica_choice import ReplicaChooser

MakeEngine = Callable[[], VirtualEngine]


class Fleet:
    """`make_engine` builds a replica. `policy`: None sends each request to the least loaded one."""

    def __init__(self, make_engine: MakeEngine, replicas: int, policy: RoutingPolicy | None) -> None:
        self._make_engine, self._chooser = make_engine, ReplicaChooser(policy)
        self._engines: dict[int, VirtualEngine] = {}
        self.loads: dict[int, int] = {}  # requests of each replica that gets new ones
        self._events: list[tuple[float, int, int]] = []  # when a replica's steps end, a number that orders equal times, the replica
        self._numbers = 0
        self._joining: list[tuple[float, int]] = []
        for _ in range(replicas):
            self._add_engine()

    @property
    def num_replicas(self) -> int:
        """Replicas that serve, start or drain."""
        return len(self._engines) + len(self._joining)

    @property
    def num_wanted(self) -> int:
        """Replicas that serve or start, without those that drain."""
        return len(self.loads) + len(self._joining)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return sum(engine.num_requests for engine in self._engines.values())

    def run(self, arrivals: Iterable[Arrival], control: Callable[[float], None] | None = None, interval: float = 1.0) -> None:
        """Serve all requests to their end. `control` is called every `interval` seconds while
        there are arrivals."""
        tick = interval if control is not None else float("inf")
        for arrival in arrivals:
            while tick <= arrival.at:
                self._advance(tick)
                if control is not None:
                    control(tick)
                tick += interval
            self._advance(arrival.at)
            self._send(arrival)
        self._advance(float("inf"))

    def scale(self, count: int, now: float, delay: float) -> None:
        """Have `count` replicas: new ones serve after `delay` seconds, others drain, those with the
        fewest requests first."""
        while self.num_wanted < count:
            self._numbers += 1
            heapq.heappush(self._joining, (now + delay, self._numbers))
        while self.num_wanted > max(1, count):
            if self._joining:
                self._joining.remove(max(self._joining))
                heapq.heapify(self._joining)
                continue
            replica = min(self.loads, key=lambda number: self.loads[number])
            del self.loads[replica]
            self._chooser.forget_replica(replica)
            self._drop_drained(replica)

    def _add_engine(self) -> None:
        number = next(number for number in range(len(self._engines) + 1) if number not in self._engines)
        engine = self._engines[number] = self._make_engine()
        self.loads[number] = 0
        engine.on_finish = partial(self._finish, number)

    def _finish(self, replica: int) -> None:
        if replica in self.loads:
            self.loads[replica] -= 1

    def _drop_drained(self, replica: int) -> None:
        if replica not in self.loads and not self._engines[replica].num_requests:
            del self._engines[replica]

    def _send(self, arrival: Arrival) -> None:
        replica = next(iter(self.loads)) if len(self.loads) == 1 else self._chooser.choose_replica(arrival.prompt, "", self.loads)
        self.loads[replica] += 1
        self._numbers += 1
        if self._engines[replica].add_request(arrival, self._numbers):
            self._push(replica)

    def _push(self, replica: int) -> None:
        until = self._engines[replica].until
        if until is not None:
            self._numbers += 1
            heapq.heappush(self._events, (until, self._numbers, replica))

    def _advance(self, until: float) -> None:
        """End the steps that end before a time, or at it."""
        while True:
            event = self._events[0][0] if self._events else float("inf")
            joins = self._joining[0][0] if self._joining else float("inf")
            at = min(event, joins)
            if at > until or at == float("inf"):
                break
            if joins <= event:
                heapq.heappop(self._joining)
                self._add_engine()
                continue
            _, _, replica = heapq.heappop(self._events)
            engine = self._engines.get(replica)
            if engine is None or engine.until != at:  # an arrival has cut the steps
                continue
            engine.end_steps()
            self._push(replica)
            self._drop_drained(replica)
