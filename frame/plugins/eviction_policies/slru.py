"""`slru`: segmented LRU (least recently used)."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy

PROTECTED_FROM = 2  # uses


class Slru(EvictionPolicy):
    """Evicts prefixes that were used once before all that were used again; within a segment the
    least recently used.

    A prefix enters the protected segment with its second use.
    """

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.hits >= PROTECTED_FROM, node.last_access)
