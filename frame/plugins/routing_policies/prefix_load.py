"""`prefix_load`: the replica with the greatest share of the prompt in its cache, less its relative
load. What replicas have cached is estimated from earlier choices, unless their caches tell it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from pydantic import BaseModel

from frame.interfaces.routing import RoutingContext, RoutingPolicy, RoutingRequest

MAX_PREFIXES = 262_144  # blocks remembered, the most recently used; 154 bytes each, more beyond 30 replicas
LOAD_WEIGHT = 1.0  # score lost by a replica with a mean load more than the least; less would never move a whole prompt from one of two
SLACK = 4  # sequences; a smaller difference is no load


class PrefixLoad(RoutingPolicy):
    """The replica with the highest score: share of the prompt less relative load."""

    def __init__(self, context: RoutingContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._replicas: OrderedDict[int, int] = OrderedDict()  # hash of a prefix of whole blocks -> a bit for each replica chosen for it

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        blocks = request.blocks
        matched, held = dict.fromkeys(loads, len(blocks)), sum(1 << replica for replica in loads)
        for number, block in enumerate(blocks):
            left = held & self._replicas.get(block, 0)
            if left != held:
                matched |= {replica: number for replica in loads if (held ^ left) >> replica & 1}
                held = left
            if not held:
                break
        minimum, mean = min(loads.values()), sum(loads.values()) / len(loads)

        def score(replica: int) -> float:
            excess = max(0, loads[replica] - minimum - SLACK)
            share = request.cached.get(replica)
            return (matched[replica] / max(1, len(blocks)) if share is None else share) - LOAD_WEIGHT * excess / max(1.0, mean)

        chosen = max(loads, key=lambda replica: (score(replica), -loads[replica]))
        request.notes[chosen] = matched[chosen]
        for block in blocks:
            self._replicas[block] = self._replicas.get(block, 0) | 1 << chosen
            self._replicas.move_to_end(block)
        while len(self._replicas) > MAX_PREFIXES:
            self._replicas.popitem(last=False)
        return chosen

    def forget_request(self, request: RoutingRequest, replica: int) -> None:
        for block in request.blocks[request.notes.get(replica, len(request.blocks)) :]:  # what it had before stays
            if left := self._replicas.get(block, 0) & ~(1 << replica):
                self._replicas[block] = left
            else:
                self._replicas.pop(block, None)

    def forget_replica(self, replica: int) -> None:
        self._replicas = OrderedDict((block, left) for block, held in self._replicas.items() if (left := held & ~(1 << replica)))
