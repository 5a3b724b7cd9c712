"""KV allocators: a stack of free pages, and stacks with a bug each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.kv_allocator import KVAllocator, KVAllocatorCapabilities, KVAllocatorContext
from tests.testing.held_out import Wrong


class StackAllocator(KVAllocator):
    """The page that was freed last is used first: its memory is still in the device's cache."""

    capabilities: ClassVar[KVAllocatorCapabilities] = KVAllocatorCapabilities()

    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        self._stack = np.arange(context.num_pages - 1, 0, -1, dtype=np.int32)
        self._top = len(self._stack)

    @property
    def num_free(self) -> int:
        return self._top

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        self._top -= num_pages
        return self._stack[self._top : self._top + num_pages][::-1].copy()

    def free_pages(self, pages: np.ndarray) -> None:
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)


TWIN = StackAllocator
WRONG = Wrong()


@WRONG.add("Pools of more than 65,536 pages give two requests the same page: page numbers are kept in 16 bits to save memory.")
class SixteenBitPages(StackAllocator):
    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._stack = self._stack.astype(np.uint16)

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        return super().allocate_pages(num_pages, after).astype(np.int32)

    def free_pages(self, pages: np.ndarray) -> None:
        super().free_pages(pages.astype(np.uint16))


@WRONG.add("The pages that a request got change under it when another one frees: the result is a view of the stack.")
class ReturnsView(StackAllocator):
    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        self._top -= num_pages
        return self._stack[self._top : self._top + num_pages]


@WRONG.add("Pages are handed out twice: freed arrays are kept as they are, and read when the caller has reused them.")
class KeepsFreedViews(StackAllocator):
    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._returned: list[np.ndarray] = []

    @property
    def num_free(self) -> int:
        return self._top + sum(map(len, self._returned))

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        for pages in self._returned:
            super().free_pages(pages)
        self._returned.clear()
        return super().allocate_pages(num_pages, after)

    def free_pages(self, pages: np.ndarray) -> None:
        self._returned.append(pages)


@WRONG.add("Steps take milliseconds longer on large devices: each free sorts all free pages to keep runs together.")
class SortsPool(StackAllocator):
    def free_pages(self, pages: np.ndarray) -> None:
        super().free_pages(pages)
        self._stack[: self._top] = np.sort(self._stack[: self._top])[::-1]


@WRONG.add("Up to 31 pages of each pool are never used: the bitmap has whole words only.")
class WholeWords(StackAllocator):
    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        usable = context.num_pages // 32 * 32 if context.num_pages > 64 else context.num_pages
        self._stack = np.concatenate([np.arange(usable - 1, 0, -1, dtype=np.int32), np.zeros(context.num_pages - usable, np.int32)])
        self._top = usable - 1


@WRONG.add("The ranks of an engine use different pages, so that tiers and transfers move the wrong blocks: the order is random.")
class RandomOrder(StackAllocator):
    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        np.random.default_rng().shuffle(self._stack)


@WRONG.add("The cache shrinks by one page each time that it was full: the first free after that overwrites the bottom entry.")
class LeaksAfterFull(StackAllocator):
    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._was_full = False

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        pages = super().allocate_pages(num_pages, after)
        self._was_full = self._top == 0
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        super().free_pages(pages)
        if self._was_full and len(pages) > 1:
            self._top -= 1
        self._was_full = False


@WRONG.add("Two requests that share a prompt write to one page: both rows get the page after the last one that they share.")
class SharesNeighbour(StackAllocator):
    capabilities: ClassVar[KVAllocatorCapabilities] = KVAllocatorCapabilities(after=True)

    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._is_free = np.ones(context.num_pages + 1, bool)
        self._is_free[[0, -1]] = False
        self._num_free = self._top
        self._entry = np.zeros(context.num_pages + 1, np.int64)  # where a free page is on the stack; other entries are stale
        self._entry[self._stack] = np.arange(self._top)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        if after is not None and len(after) == num_pages:
            near = after + 1
            if self._is_free[near].all() and (after > 0).all():
                self._is_free[near] = False
                self._num_free -= num_pages
                return near.astype(np.int32)
        pages = np.empty(0, np.int32)
        while len(pages) < num_pages:
            size = min(self._top, num_pages - len(pages))
            self._top -= size
            block = self._stack[self._top : self._top + size][::-1]
            is_current = self._is_free[block] & (self._entry[block] == np.arange(self._top + size - 1, self._top - 1, -1))
            pages = np.concatenate([pages, block[is_current]])
        self._is_free[pages] = False
        self._num_free -= num_pages
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        if self._top + len(pages) > len(self._stack):
            self._stack = np.concatenate([self._stack[: self._top], np.zeros(self._top + 2 * len(pages), np.int32)])
        self._entry[pages] = np.arange(self._top, self._top + len(pages))
        super().free_pages(pages)
        self._is_free[pages] = True
        self._num_free += len(pages)
