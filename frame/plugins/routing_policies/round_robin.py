"""`round_robin`: each replica in turn."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from frame.interfaces.routing import RoutingContext, RoutingPolicy, RoutingRequest


class RoundRobin(RoutingPolicy):
    """The replica with the next higher number than the last one; after the highest the lowest."""

    def __init__(self, context: RoutingContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._last = -1

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        later = [replica for replica in loads if replica > self._last]
        self._last = min(later or loads)
        return self._last
