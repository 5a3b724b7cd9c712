"""`lru`: evicts the least recently used prefix."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Lru(EvictionPolicy):
    """Evicts the least recently used prefix."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.last_access,)
