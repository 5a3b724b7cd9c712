"""Manifest of the in-tree logits processors: records only. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.sampling import ProcessorCapabilities
from frame.registration import KindRegistry, hookimpl

_HERE = "frame.plugins.logits_processors"


@hookimpl
def register_logits_processors(registry: KindRegistry) -> None:
    """Add the in-tree logits processors. They are applied by descending rank."""
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    for rank, name, target, params, summary in (
        (40, "penalties", "penalties:Penalties", penalties, "Frequency, presence and repetition penalties."),
        (30, "logit-bias", "logit_bias:LogitBias", ("logit_bias",), "Adds a bias to single logits."),
        (20, "bad-words", "bad_words:BadWords", ("bad_words", "bad_words_ids"), "Bans token sequences."),
        (10, "min-tokens", "min_tokens:MinTokens", ("min_tokens",), "Bans the end of a request until its minimum length."),
        (5, "thinking-budget", "thinking_budget:ThinkingBudget", ("thinking_token_budget",), "Ends reasoning after so many tokens."),
    ):
        registry.add(name, f"{_HERE}.{target}", summary=summary, rank=rank, capabilities=ProcessorCapabilities(params, custom=()))
