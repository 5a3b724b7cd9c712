"""`lru`: the prefix that was used longest ago goes first."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Lru(EvictionPolicy):
    """The prefix that was used longest ago goes first."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.last_access,)
