"""Manifest of the in-tree grammar backends: records only. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.sampling import GrammarCapabilities
from frame.plugins.grammar_backends.options import GrammarOptions, XGrammarOptions
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_grammar_backends(registry: KindRegistry) -> None:
    """Add the in-tree grammar backends."""
    registry.add(
        "combined",
        "frame.plugins.grammar_backends.combined:CombinedBackend",
        capabilities=GrammarCapabilities(),
        options=XGrammarOptions,
        requires=("llguidance>=1.8", "xgrammar>=0.2"),
        summary="All kinds: llguidance; xgrammar for what llguidance rejects.",
        rank=20,
    )
    registry.add(
        "xgrammar",
        "frame.plugins.grammar_backends.xgrammar:XGrammarBackend",
        capabilities=GrammarCapabilities(),
        options=XGrammarOptions,
        requires=("xgrammar>=0.2",),
        summary="All kinds, by xgrammar: compiles a grammar first, in milliseconds to seconds.",
        rank=10,
    )
    registry.add(
        "llguidance",
        "frame.plugins.grammar_backends.llguidance:LLGuidanceBackend",
        capabilities=GrammarCapabilities(),
        options=GrammarOptions,
        requires=("llguidance>=1.8",),
        summary="All kinds, by llguidance: compiles in a millisecond.",
    )
    registry.suggest_distribution("automata", "frame-automata")
