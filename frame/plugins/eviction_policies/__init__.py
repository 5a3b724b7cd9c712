"""Manifest of the in-tree eviction policies: records only. Must not import the plugins."""

from __future__ import annotations

from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_eviction_policies(registry: KindRegistry) -> None:
    """Add the in-tree eviction policies."""
    for name, target, summary in (
        ("lru", "lru:Lru", "Evicts the least recently used prefix."),
        ("lfu", "lfu:Lfu", "Evicts the least frequently used prefix; on a tie the least recently used."),
        ("fifo", "fifo:Fifo", "Evicts the prefix that was cached first."),
        ("mru", "mru:Mru", "Evicts the most recently used prefix, for scans over more prefixes than fit."),
        ("slru", "slru:Slru", "Segmented LRU: evicts prefixes used once before those used again."),
        ("priority", "priority:Priority", "Evicts the prefix with the lowest request priority; on a tie the least recently used."),
    ):
        registry.add(name, f"frame.plugins.eviction_policies.{target}", summary=summary)
