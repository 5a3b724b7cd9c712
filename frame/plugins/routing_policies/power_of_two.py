"""`power_of_two`: the less loaded of two replicas drawn at random (Mitzenmacher 2001). Several
routers that share no state do not all choose the same replica, as with `least_load`."""

from __future__ import annotations

import random
from collections.abc import Mapping

from pydantic import BaseModel

from frame.interfaces.routing import RoutingContext, RoutingPolicy, RoutingRequest


class PowerOfTwo(RoutingPolicy):
    """The less loaded of two replicas drawn at random."""

    def __init__(self, context: RoutingContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._random = random.Random(context.seed)

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        return min(self._random.sample([*loads], min(2, len(loads))), key=loads.__getitem__)
