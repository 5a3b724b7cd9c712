"""Manifest of the in-tree reasoning parsers: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.hookspecs import hookimpl
from frame.plugins.reasoning_parsers.options import ThinkTagsOptions

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_reasoning_parsers(registry: KindRegistry) -> None:
    """Add the in-tree reasoning parsers."""
    registry.add(
        "think-tags",
        "frame.plugins.reasoning_parsers.think_tags:ThinkTags",
        options=ThinkTagsOptions,
        summary="Thinking between <think> and </think> at the start of an answer.",
        api="reasoning_parser/1",
    )
