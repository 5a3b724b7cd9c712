"""Manifest of the in-tree MoE dispatchers: records only. Must not import the plugins.

A record names its target as "module:Class"; the registry imports it when the configuration selects
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.moe import MoECapabilities
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_moe_dispatchers(registry: KindRegistry) -> None:
    """Add the in-tree MoE dispatchers."""
    registry.add(
        "all_reduce",
        "frame.plugins.moe_dispatchers.all_reduce:AllReduce",
        capabilities=MoECapabilities(devices=("cpu", "cuda"), graphs=True),
        rank=10,
        summary="Every rank computes a slice of each expert; the slices are summed.",
    )
