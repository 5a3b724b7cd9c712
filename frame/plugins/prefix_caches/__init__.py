"""Manifest of the in-tree prefix caches: records only. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.cache import PrefixCacheCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_prefix_caches(registry: KindRegistry) -> None:
    """Add the in-tree prefix caches."""
    here = "frame.plugins.prefix_caches"
    registry.add(
        "radix",
        f"{here}.radix:RadixCache",
        capabilities=PrefixCacheCapabilities(groups=True),
        rank=50,
        summary="Reuses equal prefixes by a radix tree over pages.",
    )
    registry.add(
        "none",
        f"{here}.none:NoCache",
        capabilities=PrefixCacheCapabilities(reuses=False, eviction_policy=False, groups=True),
        rank=-100,
        summary="Stores nothing: every prompt is computed.",
    )
