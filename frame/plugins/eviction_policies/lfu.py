"""`lfu`: evicts the least frequently used prefix; on a tie the least recently used."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Lfu(EvictionPolicy):
    """Evicts the least frequently used prefix; on a tie the least recently used."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.hits, node.last_access)
