"""`slru`: segmented least recently used. A prefix is on probation until it is used a second time."""

from __future__ import annotations

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy

PROTECTED_FROM = 2  # uses


class Slru(EvictionPolicy):
    """Prefixes that were used once go before all that were used again; in each segment the one used longest ago goes first.

    One pass over many new prompts so cannot push out the prefixes that are in steady use (Karedla, Love, Wherry 1994).
    """

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.hits >= PROTECTED_FROM, node.last_access)
