"""Manifest of the in-tree scheduling policies: records only. Must not import the plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_scheduling_policies(registry: KindRegistry) -> None:
    """Add the in-tree scheduling policies."""
    here = "frame.plugins.scheduling_policies"
    registry.add("fcfs", f"{here}.fcfs:Fcfs", summary="First come, first served.")
    registry.add("lpm", f"{here}.lpm:LongestPrefixMatch", summary="Longest cached prefix first, for the most reuse.")
    registry.add(
        "dfs-weight",
        f"{here}.dfs_weight:DepthFirstByWeight",
        summary="Groups requests by shared cached prefix, the largest group first.",
    )
    registry.add(
        "lof", f"{here}.lof:LongestOutputFirst", summary="Longest allowed output first, so that no long one is left for the end."
    )
    registry.add("random", f"{here}.random:RandomOrder", summary="A new random order each step, from a fixed seed.")
    registry.add(
        "priority", f"{here}.priority:PriorityFirst", summary="Highest request priority first; pushes lower ones off the device."
    )
