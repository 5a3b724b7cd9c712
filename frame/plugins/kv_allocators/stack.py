"""`stack`: allocates the pages that were freed last, since their memory may be in a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.kv_allocator import KVAllocator, KVAllocatorContext

if TYPE_CHECKING:
    from pydantic import BaseModel


class StackAllocator(KVAllocator):
    """A stack of free pages in one array; new pages come in ascending order."""

    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None:
        self._stack = np.arange(context.num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = len(self._stack)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        top = self._num_free - num_pages
        pages = self._stack[top : self._num_free][::-1].copy()
        self._num_free = top
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        self._stack[self._num_free : self._num_free + pages.size] = pages
        self._num_free += pages.size
