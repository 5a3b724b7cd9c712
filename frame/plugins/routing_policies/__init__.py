"""Manifest of the in-tree routing policies: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.routing import RoutingCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_routing_policies(registry: KindRegistry) -> None:
    """Add the in-tree routing policies."""
    keeps_prefixes, evenly = RoutingCapabilities(keeps_prefixes=True), RoutingCapabilities(avoids_load=False)
    sessions = RoutingCapabilities(avoids_load=False, keeps_sessions=True)
    for name, target, can, summary in (
        ("prefix_load", "prefix_load:PrefixLoad", keeps_prefixes, "The replica that has most of the prompt in its cache, less its load."),
        ("least_load", "least_load:LeastLoad", RoutingCapabilities(), "The replica with the fewest outstanding sequences."),
        ("power_of_two", "power_of_two:PowerOfTwo", RoutingCapabilities(), "The less loaded of two replicas drawn at random."),
        ("round_robin", "round_robin:RoundRobin", evenly, "Each replica in turn."),
        ("session", "session:Session", sessions, "The replica of the request's session; without one, the least loaded."),
    ):
        rank = 1 if name == "prefix_load" else 0
        registry.add(name, f"frame.plugins.routing_policies.{target}", capabilities=can, summary=summary, rank=rank)
