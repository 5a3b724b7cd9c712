"""`contiguous`: allocates neighbouring pages, so that the keys of a sequence lie in few runs of
memory.

Free pages are allocated by address, the lowest first, and are sorted again only once the sorted
ones are used up: a page is sorted once for each time that it is freed. An output, which grows by
single pages, gets them from the other end, where some pages behind its first one are kept for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.kv_allocator import KVAllocator, KVAllocatorContext

if TYPE_CHECKING:
    from frame.plugins.kv_allocators import ContiguousOptions

_NO_PAGES = np.empty(0, np.int32)


class ContiguousAllocator(KVAllocator):
    """Free pages are those of `_is_free`. `_sorted[_head:_tail]` holds some of them in ascending
    order, `_loose` all others. Both may hold pages that were allocated since, which are skipped."""

    def __init__(self, context: KVAllocatorContext, options: ContiguousOptions) -> None:
        self._growth = options.growth_pages
        self._is_free = np.ones(context.num_pages + 1, np.bool_)
        self._is_free[[0, -1]] = False  # page 0, and what follows the last page
        self._num_free = context.num_pages - 1
        self._sorted = np.arange(1, context.num_pages, dtype=np.int32)
        self._head, self._tail = 0, len(self._sorted)
        self._loose: list[np.ndarray] = []
        self._num_loose = 0

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        if after is None:
            return self._take_lowest(num_pages)
        each = num_pages // len(after)
        if each > 1 < len(after):
            return self._take_lowest(num_pages)
        next_pages = np.minimum(after[:, None] + np.arange(1, each + 1, dtype=np.int32), len(self._is_free) - 1)
        follows = self._is_free[next_pages].all(axis=1) & (after > 0)
        if len(after) > 1:  # rows may share a page of the prefix cache
            is_first = np.zeros_like(follows)
            is_first[np.unique(after, return_index=True)[1]] = True
            follows &= is_first
        pages = np.empty_like(next_pages)
        pages[follows] = self._take(next_pages[follows])
        if num_others := len(after) - int(np.count_nonzero(follows)):
            others = self._take_lowest(each) if each > 1 else self._start_outputs(num_others)
            pages[~follows] = others.reshape(num_others, each)
        return pages.reshape(-1)

    def free_pages(self, pages: np.ndarray) -> None:
        self._add_free(pages.copy())

    def _add_free(self, pages: np.ndarray) -> None:
        self._is_free[pages] = True
        self._num_free += pages.size
        self._loose.append(pages)
        self._num_loose += pages.size
        if self._num_loose > 2 * len(self._is_free):  # most of them were allocated and freed again since
            self._sort()

    def _take(self, pages: np.ndarray) -> np.ndarray:
        self._is_free[pages] = False
        self._num_free -= pages.size
        return pages

    def _take_lowest(self, num_pages: int) -> np.ndarray:
        """The lowest of the sorted pages."""
        parts, missing = [_NO_PAGES], num_pages
        while missing:
            if self._head == self._tail:
                self._sort()
            part = self._sorted[self._head : min(self._tail, self._head + missing)]
            self._head += len(part)
            parts.append(self._take(part[self._is_free[part]]))
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def _take_highest(self, num_pages: int) -> np.ndarray:
        """The highest of the sorted pages, in ascending order as far as they were sorted."""
        parts, missing = [_NO_PAGES], num_pages
        while missing:
            if self._head == self._tail:
                self._sort()
            part = self._sorted[max(self._head, self._tail - missing) : self._tail]
            self._tail -= len(part)
            parts.append(self._take(part[self._is_free[part]]))
            missing -= len(parts[-1])
        return np.concatenate(parts[::-1])

    def _start_outputs(self, num_rows: int) -> np.ndarray:
        """A page for each row, with free ones behind it as long as there are some."""
        stride = min(self._growth, self._num_free // num_rows)
        pages = self._take_highest(num_rows * stride).reshape(num_rows, stride)
        if stride > 1:
            self._add_free(pages[:, 1:].reshape(-1))
        return pages[:, 0]

    def _sort(self) -> None:
        rest = np.concatenate([self._sorted[self._head : self._tail], *self._loose])
        self._sorted = np.unique(rest[self._is_free[rest]])
        self._head, self._tail = 0, len(self._sorted)
        self._loose, self._num_loose = [], 0
