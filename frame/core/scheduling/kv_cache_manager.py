"""`KVCacheManager`: which pages a running request holds, from prefix match to release. The only caller of cache and allocator.

Knows slots, page-table rows and locks; knows no policy, no budget and no message.
"""

from __future__ import annotations

import numpy as np

from frame.core.interfaces.cache import PageAllocator, PrefixCache
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable

NO_WRITES = np.empty((0, 3), np.int32)


class KVCacheManager:
    """Page accounting of running requests.

    A row of the page table is `num_shared` pages of the prefix cache (locked by `request.handle`), then private pages.
    Every change of a row is also noted as a write for the device's table (`take_writes`).
    Methods that give pages up return them: the caller frees them at once, or, while a step in flight writes to them, later.
    """

    def __init__(self, table: RequestTable, cache: PrefixCache, allocator: PageAllocator, page_size: int) -> None:
        self.cache = cache
        self.allocator = allocator
        self.page_size = page_size
        self._table = table
        self._writes: list[np.ndarray] = []

    @property
    def num_available(self) -> int:
        """Pages that can be had now, by eviction if need be."""
        return self.allocator.num_free + self.cache.num_evictable

    def take(self, num_pages: int) -> np.ndarray | None:
        """Pages, evicting for them if need be; None when there are too few (nothing is evicted then)."""
        short = num_pages - self.allocator.num_free
        if short > 0:
            if short > self.cache.num_evictable:
                return None
            self.allocator.free(self.cache.evict(short))
        return self.allocator.alloc(num_pages)

    def lock_prefix(self, request: Request) -> np.ndarray:
        """Find and lock the longest cached prefix of `request.tokens`, which may be all of them. -> pages."""
        # where every prompt token's logits are needed, every token is computed, and a single one always is
        if request.wants_prompt_logprobs or len(request.tokens) == 1:
            return np.empty(0, np.int32)
        match = self.cache.match(request.tokens, request.namespace)
        self.cache.lock(match.handle)
        request.handle = match.handle
        return match.pages

    def unlock_prefix(self, request: Request) -> None:
        self.cache.unlock(request.handle)
        request.handle = None

    def enter(self, request: Request, pages: np.ndarray) -> None:
        """Start the row of a request that has a slot with the pages that `lock_prefix` found. The last token is computed in any case,
        for its logits."""
        a, slot = self._table.arrays, request.slot
        self._write_row(slot, 0, pages)
        a.num_pages[slot] = a.num_shared[slot] = len(pages)
        a.num_computed_tokens[slot] = min(len(pages) * self.page_size, len(request.tokens) - 1)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make the row long enough for `num_tokens`; False when there are too few pages (nothing changes then)."""
        a = self._table.arrays
        have = int(a.num_pages[slot])
        want = -(-num_tokens // self.page_size)
        if want <= have:
            return True
        pages = self.take(want - have)
        if pages is None:
            return False
        self._write_row(slot, have, pages)
        a.num_pages[slot] = want
        return True

    def grow_by_one(self, slots: np.ndarray) -> bool:
        """One more page for each slot, all or none."""
        pages = self.take(len(slots))
        if pages is None:
            return False
        a = self._table.arrays
        at = a.num_pages[slots]
        a.page_table[slots, at] = pages
        a.num_pages[slots] = at + 1
        writes = np.empty((len(slots), 3), np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = slots, at, pages
        self._writes.append(writes)
        return True

    def share(self, request: Request, num_computed: int) -> np.ndarray:
        """Give the computed whole pages of a running request to the cache, so that others find them. -> duplicates, given up."""
        a, slot = self._table.arrays, request.slot
        shared, whole = int(a.num_shared[slot]), num_computed // self.page_size
        if whole <= shared or not self.cache.reuses:
            return NO_WRITES[:0, 0]
        row, tokens = a.page_table[slot], request.tokens[: whole * self.page_size]
        inserted = self.cache.insert(tokens, row[:whole], request.namespace, request.priority)
        self.cache.lock(inserted.handle)
        self.cache.unlock(request.handle)
        request.handle = inserted.handle
        a.num_shared[slot] = whole
        cached = inserted.num_cached // self.page_size
        if cached <= shared:
            return NO_WRITES[:0, 0]
        duplicates = row[shared:cached].copy()
        pages = self.cache.match(tokens, request.namespace).pages
        self._write_row(slot, shared, pages[shared:cached])
        return duplicates

    def leave(self, request: Request, tokens: np.ndarray, num_computed: int) -> np.ndarray:
        """End the row: the first `num_computed` of `tokens` stay in the cache (0: nothing is kept). -> pages given up."""
        a, slot = self._table.arrays, request.slot
        row, shared = a.page_table[slot, : a.num_pages[slot]].copy(), int(a.num_shared[slot])
        whole = num_computed // self.page_size
        freed = row[shared:]
        if whole > shared:
            kept = tokens[: whole * self.page_size]
            inserted = self.cache.insert(kept, row[:whole], request.namespace, request.priority)
            duplicates = row[shared : max(shared, inserted.num_cached // self.page_size)]
            freed = np.concatenate((duplicates, row[whole:]))
        self.unlock_prefix(request)
        a.num_pages[slot] = a.num_shared[slot] = 0
        return freed

    def take_writes(self) -> np.ndarray:
        """All page-table writes since the last call, int32 [n, 3] of (slot, index, page), in order."""
        if not self._writes:
            return NO_WRITES
        writes = self._writes[0] if len(self._writes) == 1 else np.concatenate(self._writes)
        self._writes = []
        return writes

    def write_again(self, slots: np.ndarray) -> None:
        """Note the rows of these slots as writes once more, since it is not known whether the device got the last ones."""
        for slot in np.unique(slots).tolist():
            self._write_row(slot, 0, self._table.arrays.page_table[slot, : self._table.arrays.num_pages[slot]])

    def private_pages(self, slot: int) -> np.ndarray:
        a = self._table.arrays
        return a.page_table[slot, a.num_shared[slot] : a.num_pages[slot]]

    def shared_pages(self, slot: int) -> np.ndarray:
        a = self._table.arrays
        return a.page_table[slot, : a.num_shared[slot]]

    def _write_row(self, slot: int, start: int, pages: np.ndarray) -> None:
        if not len(pages):
            return
        self._table.arrays.page_table[slot, start : start + len(pages)] = pages
        writes = np.empty((len(pages), 3), np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = slot, np.arange(start, start + len(pages)), pages
        self._writes.append(writes)
