"""Manifest of the in-tree eviction policies: records only. Must not import the plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_eviction_policies(registry: KindRegistry) -> None:
    """Add the in-tree eviction policies."""
    here = "frame.plugins.eviction_policies"
    registry.add("lru", f"{here}.lru:Lru", summary="Evicts the least recently used prefix.")
    registry.add(
        "lfu", f"{here}.lfu:Lfu", summary="Evicts the least frequently used prefix; on a tie the least recently used."
    )
    registry.add("fifo", f"{here}.fifo:Fifo", summary="Evicts the prefix that was cached first.")
    registry.add(
        "mru", f"{here}.mru:Mru", summary="Evicts the most recently used prefix, for scans over more prefixes than fit."
    )
    registry.add("slru", f"{here}.slru:Slru", summary="Segmented LRU: evicts prefixes used once before those used again.")
    registry.add(
        "priority",
        f"{here}.priority:Priority",
        summary="Evicts the prefix with the lowest request priority; on a tie the least recently used.",
    )
