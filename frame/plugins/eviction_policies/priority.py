"""`priority`: the prefix of the lowest request priority goes first, among equals the one used longest ago."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy


class Priority(EvictionPolicy):
    """The prefix of the lowest request priority goes first, among equals the one used longest ago."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.priority, node.last_access)
