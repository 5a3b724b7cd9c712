"""Manifest of the in-tree eviction policies: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.cache import API
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_eviction_policies(registry: KindRegistry) -> None:
    """Add the in-tree eviction policies."""
    here = "frame.plugins.eviction_policies"
    registry.add("lru", f"{here}.lru:Lru", api=API, summary="The prefix that was used longest ago goes first.")
    registry.add(
        "lfu", f"{here}.lfu:Lfu", api=API, summary="The prefix that was used least often goes first, among equals the one used longest ago."
    )
    registry.add("fifo", f"{here}.fifo:Fifo", api=API, summary="The prefix that was cached first goes first, used or not.")
    registry.add(
        "mru", f"{here}.mru:Mru", api=API, summary="The prefix that was used last goes first: for scans over more prefixes than fit."
    )
    registry.add("slru", f"{here}.slru:Slru", api=API, summary="Prefixes used once go before those used again, each by recency.")
    registry.add(
        "priority",
        f"{here}.priority:Priority",
        api=API,
        summary="The prefix of the lowest request priority goes first, among equals the one used longest ago.",
    )
