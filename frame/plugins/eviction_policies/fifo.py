"""`fifo`: evicts the prefix that was cached first."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Fifo(EvictionPolicy):
    """Evicts the prefix that was cached first."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.created,)
