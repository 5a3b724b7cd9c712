"""Manifest of the in-tree tool call parsers: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_tool_call_parsers(registry: KindRegistry) -> None:
    """Add the in-tree tool call parsers."""
    registry.add(
        "hermes",
        "frame.plugins.tool_call_parsers.hermes:Hermes",
        summary="Calls as JSON between <tool_call> and </tool_call>.",
        api="tool_call_parser/1",
    )
