"""Manifest of frame-automata: registers the grammar backend `automata`. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame import hookimpl
from frame.core.interfaces.sampling import GrammarCapabilities
from frame.plugins.grammar_backends.options import XGrammarOptions

if TYPE_CHECKING:
    from frame.registration import KindRegistry


@hookimpl
def register_grammar_backends(registry: KindRegistry) -> None:
    """Add the backend. Its rank is below that of `combined`, so `auto` does not choose it."""
    registry.add(
        "automata",
        "frame_automata.backend:AutomataBackend",
        capabilities=GrammarCapabilities(),
        options=XGrammarOptions,
        requires=("llguidance>=1.8", "xgrammar>=0.2"),
        summary="Regular grammars as automata with cached masks; every other grammar by the backend `combined`.",
        rank=-10,
        api="grammar_backend/3",
    )
