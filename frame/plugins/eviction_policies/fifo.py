"""`fifo`: the prefix that was cached first goes first, used or not."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Fifo(EvictionPolicy):
    """The prefix that was cached first goes first, used or not."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.created,)
