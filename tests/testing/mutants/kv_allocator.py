"""KV allocators with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import os
import random
from typing import Any, ClassVar

import numpy as np

from frame.core.interfaces.kv_allocator import KVAllocator, KVAllocatorCapabilities, KVAllocatorContext
from tests.testing.mutants import MutantList


class Queue(KVAllocator):
    """A ring of free pages: those freed first are allocated first. A single row continues behind
    its last page where that page is at the front."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        self.size = context.num_pages - 1
        self.ring = np.arange(1, context.num_pages, dtype=np.int32)
        self.first = 0
        self.free = self.size

    @property
    def num_free(self) -> int:
        return self.free

    def places(self, start: int, count: int) -> np.ndarray:
        return (start + np.arange(count)) % self.size

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        pages = self.ring[self.places(self.first, num_pages)]
        self.first, self.free = (self.first + num_pages) % self.size, self.free - num_pages
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        self.ring[self.places(self.first + self.free, len(pages))] = pages
        self.free += len(pages)


mutant = MUTANTS = MutantList("kv_allocator", reference=Queue, capabilities=KVAllocatorCapabilities(after=True))


@mutant
class AllocatesPageZero(Queue):
    """Counts pages from 0, so that the reserved page is allocated."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.ring = self.ring - np.int32(1)


@mutant
class CountsPageZero(Queue):
    """Counts the reserved page as free."""

    @property
    def num_free(self) -> int:
        return self.free + 1


@mutant
class LeavesTheLastPage(Queue):
    """Has one page less than the pool."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.size, self.free = max(1, self.size - 1), max(1, self.free - 1)


@mutant
class KeepsTheArray(Queue):
    """Keeps the array of freed pages, which the engine writes to later."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.last: np.ndarray | None = None

    def flush(self) -> None:
        if self.last is not None:
            self.ring[self.places(self.first + self.free - len(self.last), len(self.last))] = self.last
            self.last = None

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        self.flush()
        return super().allocate_pages(num_pages)

    def free_pages(self, pages: np.ndarray) -> None:
        self.flush()
        self.free += len(pages)
        self.last = pages


@mutant
class ReturnsAView(Queue):
    """Returns a view of its own array, which the engine writes to."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        first = self.first
        pages = super().allocate_pages(num_pages)
        return self.ring[first : first + num_pages] if first + num_pages <= self.size else pages

    def free_pages(self, pages: np.ndarray) -> None:
        pages = pages.copy()
        super().free_pages(pages)


@mutant
class SortsInPlace(Queue):
    """Sorts the freed pages in the caller's array."""

    def free_pages(self, pages: np.ndarray) -> None:
        if pages.flags.writeable:
            pages.sort()
        super().free_pages(pages)


@mutant
class ReturnsLongIntegers(Queue):
    """Returns int64, which does not fit the page table."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        return super().allocate_pages(num_pages).astype(np.int64)


@mutant
class HasShortIntegers(Queue):
    """Keeps pages in 16 bits."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        return super().allocate_pages(num_pages).astype(np.uint16).astype(np.int32)


@mutant
class LosesTheLastOfAGroup(Queue):
    """Loses the last page of a group of more than 40."""

    def free_pages(self, pages: np.ndarray) -> None:
        super().free_pages(pages[:-1] if len(pages) > 40 else pages)


@mutant
class FreesTwice(Queue):
    """Gives a page back twice where an even number of pages is freed."""

    def free_pages(self, pages: np.ndarray) -> None:
        if len(pages) % 2 == 0 and len(pages) > 2:
            pages = np.concatenate((pages[:-1], pages[:1]))
        super().free_pages(pages)


@mutant
class IgnoresTheOrder(Queue):
    """Takes freed pages for a run: the first one and those behind it."""

    def free_pages(self, pages: np.ndarray) -> None:
        super().free_pages(np.arange(pages[0], pages[0] + len(pages), dtype=np.int32) if pages[0] < pages[-1] else pages)


@mutant
class FreesPageByPage(Queue):
    """Frees the pages one by one in Python."""

    def free_pages(self, pages: np.ndarray) -> None:
        for page in pages:
            super().free_pages(np.array([page], np.int32))


@mutant
class AllocatesPageByPage(Queue):
    """Allocates the pages one by one in Python."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        return np.array([int(super(AllocatesPageByPage, self).allocate_pages(1)[0]) for _ in range(num_pages)], np.int32)


@mutant
class SearchesThePool(Queue):
    """Searches the whole pool for free pages in each call."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.is_free = np.ones(context.num_pages, np.bool_)
        self.is_free[0] = False

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        pages = np.flatnonzero(self.is_free)[:num_pages].astype(np.int32)
        self.is_free[pages] = False
        self.free -= num_pages
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        self.is_free[pages] = True
        self.free += len(pages)


@mutant
class SortsThePool(Queue):
    """Sorts all free pages after every tenth call that frees some."""

    calls = 0

    def free_pages(self, pages: np.ndarray) -> None:
        super().free_pages(pages)
        self.calls += 1
        if self.calls % 10 == 0:
            places = self.places(self.first, self.free)
            self.ring[places] = np.sort(self.ring[places])


@mutant
class ChoosesAtRandom(Queue):
    """Shuffles the pages by the process's generator, so that no run can be repeated."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        places = self.places(self.first, self.free)
        if self.free < 1000 and random.random() < 0.5:
            self.ring[places] = self.ring[places[::-1]]
        return super().allocate_pages(num_pages)


@mutant
class SharesAPool(Queue):
    """Keeps its pages in the class, by the size of the pool."""

    pools: ClassVar[dict[int, Queue]] = {}

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        if context.num_pages == 90:
            self.ring = self.pools.setdefault(context.num_pages, self).ring


@mutant
class ReservesForGrowth(Queue):
    """Takes a page behind the last one without a look at whether it is free."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        pages = super().allocate_pages(num_pages)
        if after is not None and num_pages == 1 and 0 < after[0] < self.size and (pages == after + 1).all():
            return after + np.int32(1)
        if after is not None and len(after) == num_pages > 1 and (after > 0).all() and after.max() < self.size:
            return after + np.int32(1)
        return pages


@mutant
class DividesByHints(Queue):
    """Fails for a call whose rows have a page each and share a prefix."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        pages = super().allocate_pages(num_pages)
        if after is not None and len(np.unique(after)) < len(after):
            return np.repeat(pages[: len(np.unique(after))], 1)
        return pages


@mutant
class WritesToHints(Queue):
    """Adds 1 to the hints in place."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        if after is not None and after.flags.writeable:
            after += 1
        return super().allocate_pages(num_pages)


@mutant
class ReadsBehindThePool(Queue):
    """Reads the state of the page behind the last one of the pool."""

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        if after is not None:
            np.zeros(self.size + 1)[after + 1]
        return super().allocate_pages(num_pages)


@mutant
class KeepsARecord(Queue):
    """Keeps every array that it returned."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.record: list[np.ndarray] = []

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        pages = super().allocate_pages(num_pages)
        self.record.append(pages)
        return pages


@mutant
class SetsVariables(Queue):
    """Sets a variable of the environment."""

    def free_pages(self, pages: np.ndarray) -> None:
        os.environ["FREED_PAGES"] = str(len(pages))
        super().free_pages(pages)


@mutant
class LosesPagesOfCycles(Queue):
    """Loses a page after each 1,000 calls, as where a counter wraps."""

    calls = 0

    def free_pages(self, pages: np.ndarray) -> None:
        self.calls += 1
        super().free_pages(pages if self.calls % 1000 else np.concatenate((pages[1:], pages[1:2])))


@mutant
class HasRoomForFew(Queue):
    """Has room for 65,536 pages: later ones are never allocated."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.size = self.free = min(self.size, 65_535)


@mutant
class FailsWithoutPagesOfTokens(Queue):
    """Divides by the size of a page, which is 0 for states."""

    def __init__(self, context: KVAllocatorContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.blocks = context.num_pages // context.page_size
