"""Manifest of the in-tree logits processors: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


_HERE = "frame.plugins.logits_processors"


@hookimpl
def register_logits_processors(registry: KindRegistry) -> None:
    """Add the in-tree logits processors; the one of higher rank is applied first."""
    for rank, name, target, summary in (
        (40, "penalties", "penalties:Penalties", "Frequency, presence and repetition penalties."),
        (30, "logit-bias", "logit_bias:LogitBias", "A number added to single logits."),
        (20, "bad-words", "bad_words:BadWords", "Bans token sequences."),
        (10, "min-tokens", "min_tokens:MinTokens", "Bans the end of a request until it has so many tokens."),
    ):
        registry.add(name, f"{_HERE}.{target}", api="logits_processor/1", summary=summary, rank=rank)
