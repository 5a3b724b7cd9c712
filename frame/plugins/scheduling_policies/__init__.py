"""Manifest of the in-tree scheduling policies: records only. Must not import the plugins.

A record names its target as "module:Class"; the registry imports it when the configuration selects
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.scheduling import API
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_scheduling_policies(registry: KindRegistry) -> None:
    """Add the in-tree scheduling policies."""
    here = "frame.plugins.scheduling_policies"
    registry.add("fcfs", f"{here}.fcfs:Fcfs", api=API, summary="First come, first served.")
    registry.add("lpm", f"{here}.lpm:LongestPrefixMatch", api=API, summary="Longest cached prefix first, for the most reuse.")
    registry.add(
        "dfs-weight",
        f"{here}.dfs_weight:DepthFirstByWeight",
        api=API,
        summary="Groups requests by shared cached prefix, the largest group first.",
    )
    registry.add(
        "lof", f"{here}.lof:LongestOutputFirst", api=API, summary="Longest allowed output first, so that no long one is left for the end."
    )
    registry.add("random", f"{here}.random:RandomOrder", api=API, summary="A new random order each step, from a fixed seed.")
    registry.add(
        "priority", f"{here}.priority:PriorityFirst", api=API, summary="Highest request priority first; pushes lower ones off the device."
    )
