"""A routing policy: replicas of unequal speed get requests in proportion to their weights."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, PositiveFloat

from frame.interfaces.routing import RoutingContext, RoutingPolicy, RoutingRequest
from frame.registration import KindRegistry, hookimpl


class Options(BaseModel):
    """`weights`: of the replicas in their order; those beyond have weight 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: tuple[PositiveFloat, ...] = ()


class Weighted(RoutingPolicy):
    """The replica with the least load for its weight, the request counted."""

    def __init__(self, context: RoutingContext, options: Options) -> None:
        super().__init__(context, options)
        self._weights = dict(enumerate(options.weights))

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        return min(loads, key=lambda replica: (loads[replica] + 1) / self._weights.get(replica, 1.0))


@hookimpl
def register_routing_policies(registry: KindRegistry) -> None:
    """Add `weighted`."""
    registry.add("weighted", Weighted, options=Options, api="routing_policy/1", summary="The least load for a weight of each replica.")
