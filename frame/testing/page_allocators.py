"""Page allocators with frame's own way to choose pages, for schedulers that tests assemble. Must
not know a KV allocator by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from frame.core.interfaces.cache_groups import PagePool
from frame.core.interfaces.kv_allocator import KVAllocator, KVAllocatorContext
from frame.core.kv_cache.page_allocator import GroupedAllocator, PagedAllocator
from frame.plugins.loader import load_registry


@functools.cache
def _load_chooser() -> type[KVAllocator]:
    """frame's own KV allocator of the highest rank."""
    registry = load_registry(installed=False)
    return registry.load(registry.records("kv_allocator")[0])


def make_allocator(num_pages: int) -> PagedAllocator:
    """The allocator of a uniform model. `num_pages`: the reserved page 0 included."""
    return PagedAllocator(num_pages, _load_chooser()(KVAllocatorContext(num_pages, 1)))


def make_grouped_allocator(pools: Sequence[PagePool]) -> GroupedAllocator:
    """The allocator of a model with several cache groups."""
    return GroupedAllocator(pools, [_load_chooser()(KVAllocatorContext(each.num_pages, each.page_size, each.kind)) for each in pools])
