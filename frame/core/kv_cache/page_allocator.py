"""`PagedAllocator`: counts the allocated and the free pages of the KV pool (vLLM: `BlockPool`); a
`KVAllocator` chooses among the free ones. It must not know tokens or requests.

Page 0 is reserved and never allocated: padding rows of a captured CUDA graph write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from frame.core.blame import describe
from frame.core.interfaces.cache_groups import PagePool
from frame.core.interfaces.kv_allocator import KVAllocator

RESERVED_PAGE = 0


class PagedAllocator:
    """The pages of one pool. num_free + allocated pages = capacity.

    `num_pages` counts every page of the pool, the reserved one included: pages 1 … num_pages - 1
    are allocated. `chooser` chooses them; a page that it must not choose raises an error, so that
    no two requests write to one page. `wants_after`: its record has the capability `after`.
    """

    def __init__(self, num_pages: int, chooser: KVAllocator, *, wants_after: bool = False) -> None:
        if num_pages < 2:
            raise ValueError(f"the KV cache has {num_pages} pages; it needs at least 2, of which page 0 is reserved for padding")
        self.capacity = num_pages - 1  # pages of the pool, without the reserved one
        self.num_free = self.capacity
        self.wants_after = wants_after
        self._chooser = chooser
        self._places = np.zeros(num_pages, np.int32)  # of each allocated page: its place in its allocation, from 1 on; 0: free
        self._numbers = np.arange(1, num_pages, dtype=np.int32)

    def alloc(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray | None:
        """-> int32 [num_pages]; None: fewer are free. after: see `KVAllocator.allocate_pages`."""
        if num_pages > self.num_free:
            return None
        if not num_pages:
            return np.empty(0, np.int32)
        choose = self._chooser.allocate_pages
        pages = choose(num_pages, after) if after is not None and self.wants_after else choose(num_pages)
        self._mark_out(pages, num_pages)
        return pages

    def free(self, pages: np.ndarray | Sequence[int]) -> None:
        """Raises ValueError, which names the page, for one that is not allocated."""
        pages = np.asarray(pages, np.int32)
        if not pages.size:
            return
        self._check_out(pages)
        self._places[pages] = 0
        self._chooser.free_pages(pages)
        self.num_free += pages.size

    def pages_out(self) -> np.ndarray:
        """All allocated pages, int32, ascending."""
        return np.flatnonzero(self._places).astype(np.int32)

    def check_integrity(self, held: Iterable[np.ndarray] = ()) -> None:
        """Raise RuntimeError unless `held` (the pages that callers hold) are exactly the allocated
        pages."""
        out = self.pages_out()
        if not self.num_free == self._chooser.num_free == self.capacity - len(out):
            counts = f"counts {self._chooser.num_free} free pages, and {len(out)} of {self.capacity} are allocated"
            raise RuntimeError(f"the page allocator is inconsistent: {describe(self._chooser)} {counts}")
        pages = np.concatenate([np.empty(0, np.int32), *(np.asarray(each, np.int32) for each in held)])
        outside = pages[(pages < 0) | (pages > self.capacity)]
        if outside.size:
            raise RuntimeError(f"pages {_some(outside)} are held, but do not exist")
        holders = np.bincount(pages, minlength=self.capacity + 1)
        twice = np.flatnonzero(holders > 1)
        if twice.size:
            raise RuntimeError(f"pages {_some(twice)} are held twice")
        lost = out[holders[out] == 0]
        if lost.size:
            raise RuntimeError(f"{lost.size} pages leaked: {_some(lost)} are allocated, but no request and no cache holds them")
        holders[out] = 0
        stray = np.flatnonzero(holders)
        if stray.size:
            raise RuntimeError(f"pages {_some(stray)} are held but free")

    def _mark_out(self, pages: np.ndarray, num_pages: int) -> None:
        """Mark pages that the plugin chose as allocated. Raises RuntimeError for pages that it must
        not choose."""
        places, numbers = self._places, self._numbers[:num_pages]
        fault = ""
        if not isinstance(pages, np.ndarray):
            fault = f"a {type(pages).__name__}, and no int32 array"
        elif pages.shape != numbers.shape or pages.dtype != np.int32:
            fault = f"{pages.dtype} {pages.shape} for {num_pages} pages"
        elif pages.min() <= RESERVED_PAGE or pages.max() > self.capacity:
            fault = f"pages {_some(pages[(pages <= RESERVED_PAGE) | (pages > self.capacity)])} of 1 to {self.capacity}"
        elif places[pages].any():
            fault = f"pages {_some(pages[places[pages] > 0])}, which are allocated"
        else:
            places[pages] = numbers
            if not (places[pages] == numbers).all():
                fault = f"pages {_some(pages[places[pages] != numbers])} twice"
                places[pages] = 0
        if fault:
            raise RuntimeError(f"{describe(self._chooser)} chose {fault}")
        self.num_free -= num_pages

    def _check_out(self, pages: np.ndarray) -> None:
        """Raise ValueError unless every page is allocated and listed once. Called before any
        change, so that a wrong `free` has no effect."""
        outside = (pages <= RESERVED_PAGE) | (pages > self.capacity)
        if outside.any():
            raise ValueError(f"page {int(pages[outside][0])} cannot be freed: pages are 1 to {self.capacity}")
        not_out = self._places[pages] == 0
        if not_out.any():
            raise ValueError(f"page {int(pages[not_out][0])} is freed twice")
        if pages.size > 1:
            ordered = np.sort(pages)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if twice.size:
                raise ValueError(f"page {int(twice[0])} is freed twice")


class GroupedAllocator:
    """Allocates the pages of several pools. A page number is that of the pool plus the pool's first
    number, so it is unique: pages of all pools are freed and checked together."""

    def __init__(self, pools: Sequence[PagePool], choosers: Sequence[KVAllocator], *, wants_after: bool = False) -> None:
        """choosers: of the pools, in their order."""
        self.pools = tuple(pools)
        self.wants_after = wants_after
        pairs = zip(pools, choosers, strict=True)
        self._allocators = [PagedAllocator(pool.num_pages, chooser, wants_after=wants_after) for pool, chooser in pairs]
        self.first_pages = np.concatenate(([0], np.cumsum([pool.num_pages for pool in pools])[:-1])).astype(np.int32)

    @property
    def capacity(self) -> int:
        """Pages of all pools, without the reserved ones."""
        return sum(allocator.capacity for allocator in self._allocators)

    @property
    def num_free(self) -> int:
        return self._allocators[0].num_free

    def count_free(self, pool: int) -> int:
        """Free pages of a pool."""
        return self._allocators[pool].num_free

    def count_pages(self, pool: int) -> int:
        """All pages of a pool, without the reserved one."""
        return self._allocators[pool].capacity

    def alloc(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray | None:
        return self._allocators[0].alloc(num_pages, after)

    def alloc_in(self, pool: int, num_pages: int) -> np.ndarray | None:
        """As `alloc`, of a pool."""
        pages = self._allocators[pool].alloc(num_pages)
        return None if pages is None else pages + self.first_pages[pool]

    def free(self, pages: np.ndarray | Sequence[int]) -> None:
        for allocator, pool_pages in zip(self._allocators, self._split(pages), strict=True):
            allocator.free(pool_pages)

    def pages_out(self) -> np.ndarray:
        out = [allocator.pages_out() + first for allocator, first in zip(self._allocators, self.first_pages, strict=True)]
        return np.concatenate(out)

    def check_integrity(self, held: Iterable[np.ndarray] = ()) -> None:
        by_pool = self._split(np.concatenate([np.empty(0, np.int32), *held]))
        for allocator, pool_pages in zip(self._allocators, by_pool, strict=True):
            allocator.check_integrity([pool_pages])

    def _split(self, pages: np.ndarray | Sequence[int]) -> list[np.ndarray]:
        """The pages of each pool, numbered from 0."""
        pages = np.asarray(pages, np.int32)
        pools = np.searchsorted(self.first_pages, pages, side="right") - 1
        return [pages[pools == pool] - first for pool, first in enumerate(self.first_pages)]


PageAllocator = PagedAllocator | GroupedAllocator


def _some(pages: np.ndarray) -> str:
    shown = ", ".join(map(str, pages[:8].tolist()))
    return f"{shown}, … ({pages.size})" if pages.size > 8 else shown
