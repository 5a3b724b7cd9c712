"""`least_load`: the replica with the fewest outstanding sequences."""

from __future__ import annotations

from collections.abc import Mapping

from frame.interfaces.routing import RoutingPolicy, RoutingRequest


class LeastLoad(RoutingPolicy):
    """The replica with the fewest outstanding sequences."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        return min(loads, key=loads.__getitem__)
