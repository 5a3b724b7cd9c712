"""Manifest of the in-tree poolers: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.pooling import PoolerCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_poolers(registry: KindRegistry) -> None:
    """Add the in-tree poolers."""
    for name, target, whole_prompts, summary in (
        ("last", "last:LastToken", False, "The hidden state of the last token."),
        ("cls", "cls:FirstToken", True, "The hidden state of the first token."),
        ("mean", "mean:Mean", True, "The mean of all tokens."),
        ("max", "max:Max", True, "The maximum of all tokens, in each dimension."),
    ):
        registry.add(name, f"frame.plugins.poolers.{target}", capabilities=PoolerCapabilities(whole_prompts), summary=summary)
