"""Manifest of the in-tree KV allocators: records and options. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field

from frame.core.interfaces.kv_allocator import KVAllocatorCapabilities
from frame.registration import KindRegistry, PluginOptions, hookimpl


class ContiguousOptions(PluginOptions):
    """`growth_pages`: pages in a row that are kept for a request where its output needs the first
    of them, as long as others are free."""

    growth_pages: int = Field(8, ge=1, le=4096, description="Pages in a row that are kept for the output of a request.")


@hookimpl
def register_kv_allocators(registry: KindRegistry) -> None:
    """Add the in-tree KV allocators."""
    package = "frame.plugins.kv_allocators"
    registry.add("stack", f"{package}.stack:StackAllocator", summary="Allocates the pages that were freed last.", rank=10)
    registry.add(
        "contiguous",
        f"{package}.contiguous:ContiguousAllocator",
        capabilities=KVAllocatorCapabilities(after=True),
        options=ContiguousOptions,
        summary="Allocates neighbouring pages: prompts in runs, and outputs behind the pages that they continue.",
    )
