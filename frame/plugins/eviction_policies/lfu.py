"""`lfu`: the prefix that was used least often goes first, among equals the one used longest ago."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Lfu(EvictionPolicy):
    """The prefix that was used least often goes first, among equals the one used longest ago."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.hits, node.last_access)
