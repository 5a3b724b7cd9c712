"""Manifest of the in-tree scheduling policies: records only. Must not import the plugins."""

from __future__ import annotations

from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_scheduling_policies(registry: KindRegistry) -> None:
    """Add the in-tree scheduling policies."""
    for name, target, summary in (
        ("fcfs", "fcfs:Fcfs", "First come, first served."),
        ("lpm", "lpm:LongestPrefixMatch", "Longest cached prefix first, for the most reuse."),
        ("dfs-weight", "dfs_weight:DepthFirstByWeight", "Groups requests by shared cached prefix, the largest group first."),
        ("lof", "lof:LongestOutputFirst", "Longest allowed output first, so that no long one is left for the end."),
        ("random", "random:RandomOrder", "A new random order each step, from a fixed seed."),
        ("priority", "priority:PriorityFirst", "Highest request priority first; preempts lower ones."),
    ):
        registry.add(name, f"frame.plugins.scheduling_policies.{target}", summary=summary)
