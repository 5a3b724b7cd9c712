"""Manifest of the in-tree logits processors: records only. Must not import the plugins.

A record names its target as "module:Class"; the registry imports it when the configuration selects
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


_HERE = "frame.plugins.logits_processors"


@hookimpl
def register_logits_processors(registry: KindRegistry) -> None:
    """Add the in-tree logits processors. They are applied by descending rank."""
    for rank, name, target, summary in (
        (40, "penalties", "penalties:Penalties", "Frequency, presence and repetition penalties."),
        (30, "logit-bias", "logit_bias:LogitBias", "Adds a bias to single logits."),
        (20, "bad-words", "bad_words:BadWords", "Bans token sequences."),
        (10, "min-tokens", "min_tokens:MinTokens", "Bans the end of a request until its minimum length."),
    ):
        registry.add(name, f"{_HERE}.{target}", summary=summary, rank=rank)
