"""`KVCacheManager`: the KV pages of running requests, from prefix match to release (vLLM:
`KVCacheManager`).

Used by the scheduler's parts; the only caller of the prefix cache and the page allocator while
requests run. It must not know policies, budgets or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from frame.core.interfaces.cache import Inserted, PrefixCache, evict_all
from frame.core.kv_cache.page_allocator import GroupedAllocator, PageAllocator
from frame.core.scheduling.group_rows import GroupRows
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable

_NO_WRITES, _NO_PAGES = np.empty((0, 3), np.int32), np.empty(0, np.int32)


class CacheEvents(Protocol):
    """What is told of changes of the prefix cache. `frame.kv_events.cache_events` documents the
    methods."""

    def record_inserted(self, keys: np.ndarray, pages: np.ndarray, namespace: str, num_cached: int) -> None: ...
    def record_removed(self, pages: np.ndarray) -> None: ...
    def record_cleared(self) -> None: ...


class KVCacheManager:
    """Allocates, shares and releases the pages of running requests.

    A request's page-table row holds `num_shared` pages of the prefix cache (locked by
    `request.handle`), then private pages:

        row[0 : num_shared]            pages that the prefix cache owns
        row[num_shared : num_pages]    private pages

    Every change of a row is also recorded as a write to the device's page table
    (`take_table_writes`). Methods that release pages return them; the caller frees them, after the
    last step in flight that writes to them.

    `groups`: the rows of the cache groups besides `tokens`; None for a uniform model.
    """

    def __init__(self, table: RequestTable, cache: PrefixCache, allocator: PageAllocator, page_size: int) -> None:
        self.cache = cache
        self.events: CacheEvents | None = None  # None: changes of the cache are not published
        self.allocator = allocator
        self.page_size = page_size
        self.groups = GroupRows(table, cache, allocator) if isinstance(allocator, GroupedAllocator) else None
        self._table = table
        self._writes: list[np.ndarray] = []

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free and evictable ones."""
        return self.allocator.num_free + self.cache.num_evictable

    @property
    def num_token_pages(self) -> int:
        """All pages of the `tokens` group, the reserved one included."""
        return self.allocator.capacity + 1 if self.groups is None else int(self.groups.allocator.first_pages[1])

    @property
    def num_growable(self) -> int:
        """Pages by which rows can grow now: `num_available`, or fewer if another cache group has
        fewer."""
        return self.num_available if self.groups is None else min(self.num_available, self.groups.num_growable)

    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray | None:
        """Allocate pages, int32 [num_pages], evicting cached prefixes if necessary; None, and no
        eviction, when too few are available. after: see `KVAllocator.allocate_pages`."""
        short = num_pages - self.allocator.num_free
        if short > 0:
            if short > self.cache.num_evictable:
                return None
            evicted = self.cache.evict(short)
            if self.events is not None:
                self.events.record_removed(evicted)
            self.allocator.free(evicted)
        return self.allocator.alloc(num_pages, after)

    def lock_prefix(self, request: Request) -> np.ndarray:
        """Match and lock the longest cached prefix of `request.tokens`, which may be all of them.
        -> its pages, int32."""
        # Prompt log-probabilities need the logits of every prompt token, so nothing is read from
        # the cache; and the last token is computed in any case, so a prompt of one token has
        # nothing to match.
        if request.wants_prompt_logprobs or len(request.tokens) == 1:
            return _NO_PAGES
        match = self.cache.match(request.cache_keys(request.tokens), request.namespace)
        self.cache.lock(match.handle)
        request.handle = match.handle
        if self.groups is not None:
            request.match, request.branch = match, match.max_length
        return match.pages

    def unlock_prefix(self, request: Request) -> None:
        """Release the lock of `lock_prefix` or of the last insertion."""
        self.cache.unlock(request.handle)
        request.handle = None

    def start_row(self, request: Request, pages: np.ndarray) -> None:
        """Begin the row of a request that has a slot; `pages` come from `lock_prefix`. At least the
        last token is left to compute, since its logits are needed."""
        a, slot = self._table.arrays, request.slot
        self._write_row(slot, 0, pages)
        a.num_pages[slot] = a.num_shared[slot] = len(pages)
        a.num_computed_tokens[slot] = min(len(pages) * self.page_size, len(request.tokens) - 1)
        if self.groups is not None:
            self.groups.start_row(slot, request.match if len(pages) else None)
            request.match = None

    def grow_row(self, slot: int, num_tokens: int) -> bool:
        """Extend the row to hold `num_tokens` tokens; False, and no change, when too few pages are
        available."""
        a = self._table.arrays
        have = int(a.num_pages[slot])
        want = -(-num_tokens // self.page_size)
        if want <= have:
            return True
        if self.groups is not None and want - have > self.groups.num_growable:
            return False
        pages = self.allocate_pages(want - have, self._find_last(np.array([slot])))
        if pages is None:
            return False
        if self.groups is not None:
            self.groups.grow_rows(np.array([slot]), np.array([have]), want - have)
        self._write_row(slot, have, pages)
        a.num_pages[slot] = want
        return True

    def grow_rows(self, slots: np.ndarray) -> bool:
        """Add one page to each slot's row; False, and no change, when too few pages are available
        for all."""
        if self.groups is not None and len(slots) > self.groups.num_growable:
            return False
        pages = self.allocate_pages(len(slots), self._find_last(slots))
        if pages is None:
            return False
        a = self._table.arrays
        at = a.num_pages[slots]
        if self.groups is not None:
            self.groups.grow_rows(slots, at)
        a.page_table[slots, at] = pages
        a.num_pages[slots] = at + 1
        writes = np.empty((len(slots), 3), np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = slots, at, pages
        self._writes.append(writes)
        return True

    def grow_rows_to(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Extend the slots' rows to hold these numbers of tokens, as far as pages are available."""
        a = self._table.arrays
        while (short := slots[a.num_pages[slots] * self.page_size < num_tokens]).size:
            if not self.grow_rows(short):
                return

    def cache_prefill(self, request: Request, num_computed: int) -> np.ndarray:
        """Insert a running request's first `num_computed` tokens (whole pages) into the prefix
        cache, so that other requests match them (vLLM: `cache_blocks`). -> its private pages that
        the cache already had, which the row no longer uses."""
        a, slot, groups = self._table.arrays, request.slot, self._cached_groups
        shared = int(a.num_shared[slot])
        if not self.cache.reuses or not self._has_uncached(slot, num_computed):
            return _NO_PAGES
        whole, row = max(num_computed // self.page_size, shared), a.page_table[slot]
        inserted = self._insert_pages(request, request.tokens, row, whole, num_computed)
        self.cache.lock(inserted.handle)
        self.cache.unlock(request.handle)
        request.handle = inserted.handle
        a.num_shared[slot] = whole
        cached = max(shared, inserted.num_cached // self.page_size)
        if groups is not None and groups.cache is not None:
            match = groups.cache.read(inserted.handle)
            groups.share_rows(slot, match)
        elif cached > shared:
            match = self.cache.match(request.cache_keys(request.tokens[: whole * self.page_size]), request.namespace)
        else:
            return _NO_PAGES
        duplicates = row[shared:cached].copy()
        self._write_row(slot, shared, match.pages[shared:cached])
        return np.concatenate((duplicates, np.array(inserted.unused, np.int32)))

    def release_row(self, request: Request, tokens: np.ndarray, num_computed: int) -> np.ndarray:
        """End the row; the first `num_computed` of `tokens` stay in the prefix cache (0: none). ->
        pages that are no longer used."""
        a, slot = self._table.arrays, request.slot
        row, shared = a.page_table[slot, : a.num_pages[slot]].copy(), int(a.num_shared[slot])
        whole, cached = max(num_computed // self.page_size, shared), shared
        unused: Sequence[int] = ()
        if num_computed >= self.page_size and self._has_uncached(slot, num_computed):
            inserted = self._insert_pages(request, tokens, row, whole, num_computed)
            cached, unused = max(shared, inserted.num_cached // self.page_size), inserted.unused
        freed = [row[shared:cached], row[whole:], np.array(unused, np.int32)]
        if self.groups is not None:
            is_kept = self._cached_groups is not None and num_computed >= self.page_size
            freed.append(self.groups.release_rows(slot, whole if is_kept else 0))
        self.unlock_prefix(request)
        a.num_pages[slot] = a.num_shared[slot] = 0
        return np.concatenate(freed)

    @property
    def _cached_groups(self) -> GroupRows | None:
        """`groups`, if the prefix cache holds pages of them."""
        return self.groups if self.groups is not None and self.groups.num_cached else None

    def _has_uncached(self, slot: int, num_computed: int) -> bool:
        """Whether a row has whole pages or checkpoints that the prefix cache does not hold."""
        groups = self._cached_groups
        is_longer = num_computed // self.page_size > self._table.arrays.num_shared[slot]
        return bool(is_longer) or (groups is not None and groups.has_checkpoints(slot, num_computed))

    def _insert_pages(self, request: Request, tokens: np.ndarray, row: np.ndarray, whole: int, num_computed: int) -> Inserted:
        """Insert the first `whole` pages of a row into the prefix cache, with those of its cache
        groups."""
        groups, kept = self._cached_groups, request.cache_keys(tokens[: whole * self.page_size])
        if groups is None:
            return self.insert_prefix(kept, row[:whole], request.namespace, request.priority)
        offers = groups.offer(request.slot, whole, num_computed)
        return self.insert_prefix(kept, row[:whole], request.namespace, request.priority, offers)

    def insert_prefix(
        self, keys: np.ndarray, pages: np.ndarray, namespace: str, priority: int, groups: Sequence[np.ndarray] = ()
    ) -> Inserted:
        """`PrefixCache.insert`; every insertion comes here."""
        offers = (groups,) if groups else ()  # a cache without groups takes none
        inserted = self.cache.insert(keys, pages, namespace, priority, *offers)
        if self.events is not None and self.cache.reuses:
            self.events.record_inserted(keys, pages, namespace, inserted.num_cached)
        return inserted

    def evict_prefixes(self) -> np.ndarray:
        """Evict all prefixes that no running request uses. -> their pages."""
        pages = evict_all(self.cache, 0 if self.groups is None else self.groups.num_cached)
        if self.events is not None:
            self.events.record_removed(pages)
            if not self.cache.num_locked:
                self.events.record_cleared()
        return pages

    def take_table_writes(self) -> np.ndarray:
        """Return the page-table writes since the last call, int32 [n, 3] of (slot, index in the
        row, page), in order."""
        if not self._writes:
            return _NO_WRITES
        writes = self._writes[0] if len(self._writes) == 1 else np.concatenate(self._writes)
        self._writes = []
        return writes

    def repeat_table_writes(self, slots: np.ndarray) -> None:
        """Record the rows of these slots as writes again: after a failed step the device may lack
        the last ones."""
        for slot in np.unique(slots).tolist():
            self._write_row(slot, 0, self._table.arrays.page_table[slot, : self._table.arrays.num_pages[slot]])
            if self.groups is not None:
                self.groups.repeat_writes(slot)

    def count_token_pages(self, pages: np.ndarray) -> int:
        """How many of these pages are those of the `tokens` group."""
        if self.groups is None:
            return len(pages)
        return int(np.count_nonzero(pages < self.groups.allocator.first_pages[1]))

    def private_pages(self, slot: int) -> np.ndarray:
        """The slot's pages that only its request holds, int32."""
        a = self._table.arrays
        private = a.page_table[slot, a.num_shared[slot] : a.num_pages[slot]]
        return private if self.groups is None else np.concatenate((private, self.groups.private_pages(slot)))

    def shared_pages(self, slot: int) -> np.ndarray:
        """The slot's pages that the prefix cache owns, int32."""
        a = self._table.arrays
        return a.page_table[slot, : a.num_shared[slot]]

    def _find_last(self, slots: np.ndarray) -> np.ndarray | None:
        """The last page of each row, 0: none; None if the allocator does not read them."""
        if not self.allocator.wants_after:
            return None
        num_pages = self._table.arrays.num_pages[slots]
        return np.where(num_pages > 0, self._table.arrays.page_table[slots, num_pages - 1], 0).astype(np.int32)

    def _write_row(self, slot: int, start: int, pages: np.ndarray) -> None:
        if not len(pages):
            return
        self._table.arrays.page_table[slot, start : start + len(pages)] = pages
        writes = np.empty((len(pages), 3), np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = slot, np.arange(start, start + len(pages)), pages
        self._writes.append(writes)
