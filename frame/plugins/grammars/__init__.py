"""Manifest of the in-tree grammars: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.sampling import GrammarCapabilities
from frame.plugins.grammars.options import GrammarOptions, XGrammarOptions
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_grammars(registry: KindRegistry) -> None:
    """Add the in-tree grammars."""
    registry.add(
        "combined",
        "frame.plugins.grammars.combined:CombinedBackend",
        capabilities=GrammarCapabilities(),
        options=XGrammarOptions,
        requires=("llguidance>=1.8", "xgrammar>=0.2"),
        summary="Every kind of grammar: by llguidance, whose masks cost less; structural tags and what that refuses by xgrammar.",
        rank=20,
        api="grammar/2",
    )
    registry.add(
        "xgrammar",
        "frame.plugins.grammars.xgrammar:XGrammarBackend",
        capabilities=GrammarCapabilities(),
        options=XGrammarOptions,
        requires=("xgrammar>=0.2",),
        summary="Every kind of grammar by xgrammar; compiles ahead, so that masks are cheap.",
        rank=10,
        api="grammar/2",
    )
    registry.add(
        "llguidance",
        "frame.plugins.grammars.llguidance:LLGuidanceBackend",
        capabilities=GrammarCapabilities(("json_schema", "json_object", "regex", "ebnf", "choice")),
        options=GrammarOptions,
        requires=("llguidance>=1.8",),
        summary="JSON schema, JSON, regular expressions, EBNF and choices by llguidance; compiles at once, covers more of JSON schema.",
        api="grammar/2",
    )
    registry.suggest_distribution("automata", "frame-automata")
