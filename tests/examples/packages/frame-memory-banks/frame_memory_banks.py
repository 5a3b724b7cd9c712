"""A KV allocator for memory in banks, as of a host with two sockets: a request stays in the bank of
its last page, and a new one goes to the bank with most free pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from frame.core.interfaces.kv_allocator import KVAllocator, KVAllocatorCapabilities, KVAllocatorContext
from frame.registration import KindRegistry, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence


class Options(BaseModel):
    """`banks`: equal parts of the pool, in the order of pages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    banks: int = Field(2, ge=1, le=64)


class MemoryBanks(KVAllocator):
    """A stack of free pages for each bank."""

    def __init__(self, context: KVAllocatorContext, options: Options) -> None:
        self._size = -(-context.num_pages // options.banks)
        pages = np.arange(1, context.num_pages, dtype=np.int32)
        banks = pages // self._size
        self._stacks = [pages[banks == bank][::-1].copy() for bank in range(options.banks)]
        self._counts = np.array([len(stack) for stack in self._stacks])

    @property
    def num_free(self) -> int:
        return int(self._counts.sum())

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        emptiest = int(self._counts.argmax())
        wanted = np.full(num_pages, emptiest)
        if after is not None:
            wanted = np.repeat(np.where(after > 0, after // self._size, emptiest), num_pages // len(after))
        pages = np.zeros(num_pages, np.int32)
        for bank in range(len(self._stacks)):
            self._fill(pages, np.flatnonzero(wanted == bank), bank)
        for bank in range(len(self._stacks)):  # what full banks did not have
            self._fill(pages, np.flatnonzero(pages == 0), bank)
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        banks = pages // self._size
        for bank, stack in enumerate(self._stacks):
            mine = pages[banks == bank]
            stack[self._counts[bank] : self._counts[bank] + len(mine)] = mine
            self._counts[bank] += len(mine)

    def _fill(self, pages: np.ndarray, places: Sequence[int] | np.ndarray, bank: int) -> None:
        places = places[: self._counts[bank]]
        top = self._counts[bank] - len(places)
        pages[places] = self._stacks[bank][top : self._counts[bank]][::-1]
        self._counts[bank] = top


@hookimpl
def register_kv_allocators(registry: KindRegistry) -> None:
    """Add `banks`."""
    can = KVAllocatorCapabilities(after=True)
    summary = "Keeps the pages of a request in one bank of memory."
    registry.add("banks", MemoryBanks, api="kv_allocator/1", capabilities=can, options=Options, summary=summary)
