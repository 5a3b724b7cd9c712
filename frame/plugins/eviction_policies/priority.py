"""`priority`: evicts the prefix with the lowest request priority; on a tie the least recently
used."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Priority(EvictionPolicy):
    """Evicts the prefix with the lowest request priority; on a tie the least recently used."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.priority, node.last_access)
