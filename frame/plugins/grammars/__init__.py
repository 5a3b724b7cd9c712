"""Manifest of the in-tree grammars: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.grammars.options import XGrammarOptions
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_grammars(registry: KindRegistry) -> None:
    """Add the in-tree grammars."""
    registry.add(
        "xgrammar",
        "frame.plugins.grammars.xgrammar:XGrammarBackend",
        options=XGrammarOptions,
        requires=("xgrammar>=0.2",),
        summary="JSON schema, JSON, regular expressions and EBNF by xgrammar.",
        api="grammar/1",
    )
