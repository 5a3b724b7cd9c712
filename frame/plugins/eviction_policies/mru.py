"""`mru`: evicts the most recently used prefix, for scans over more prefixes than fit."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Mru(EvictionPolicy):
    """Evicts the most recently used prefix, for scans over more prefixes than fit."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (-node.last_access,)
