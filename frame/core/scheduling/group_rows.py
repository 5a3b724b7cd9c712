"""`GroupRows`: the pages that running requests hold of the cache groups besides `tokens`.

A row of a `window` group has as many entries as the request's row of the page table; the leading
ones are 0 once no later token attends to them. A request holds one state of a `snapshot` group, and
checkpoints of it until they are inserted into the prefix cache; and one block of a `write_once`
group, which the prefix cache does not hold. Used by `KVCacheManager`, for
models with several groups only. Must not know policies, budgets or messages.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from frame.core.interfaces.cache import Match, PrefixCache, SupportsCacheGroups
from frame.core.interfaces.cache_groups import CHECKPOINT_TOKENS, PagePool
from frame.core.interfaces.drafter import MAX_STEPS
from frame.core.kv_cache.page_allocator import GroupedAllocator
from frame.core.scheduling.request_slots import RequestTable

_NO_PAGES = np.empty(0, np.int32)


class WindowRows:
    """The page-table rows of one `window` group, with the page numbers of the allocator."""

    def __init__(self, pool: PagePool, index: int, shape: tuple[int, int], spare: int) -> None:
        """`spare`: pages before the window that are kept, so that a match can end earlier than the
        last token."""
        if pool.window is None:
            raise ValueError("a window group needs a window")
        self.index = index  # in `Match.groups`
        self.window = pool.window
        self.page_size = pool.page_size
        self.spare = spare
        self.pages = np.zeros(shape, np.int32)  # [slots, max pages]
        self.first = np.zeros(shape[0], np.int32)  # entries before it are 0

    @property
    def width(self) -> int:
        """Pages that a match needs, at most."""
        return -(-self.window // self.page_size)

    def find_first(self, num_computed: np.ndarray) -> np.ndarray:
        """The first page that a sequence keeps when `num_computed` tokens are computed."""
        needed: np.ndarray = num_computed // self.page_size - self.spare - self.width
        return np.maximum(needed, 0)


class GroupRows:
    """Allocates and releases the pages of the groups besides `tokens`. Pages are those of the
    allocator; `take_writes` and `take_states` return them as numbers in their pool."""

    def __init__(self, table: RequestTable, cache: PrefixCache, allocator: GroupedAllocator) -> None:
        blocks = next((index for index, pool in enumerate(allocator.pools) if pool.kind == "write_once"), None)
        self.block_pool = blocks  # its number in the allocator; None: the model has no `write_once` group
        pools = allocator.pools[:blocks]
        shape = table.arrays.page_table.shape
        self.cache = cache if cache.reuses and isinstance(cache, SupportsCacheGroups) else None  # None: keeps no prefix
        self.allocator = allocator
        self.page_size = pools[0].page_size
        self.snapshot = next((index for index, pool in enumerate(pools[1:]) if pool.kind == "snapshot"), None)
        self.states = np.zeros(shape[0], np.int32)  # by slot; 0: none
        self.blocks = np.zeros(shape[0], np.int32)  # by slot; 0: none
        self.interval = -(-CHECKPOINT_TOKENS // self.page_size) * self.page_size
        # a request may end one step before the one that was scheduled, and its last state is older
        spare = 1 + (self.interval // self.page_size if self.snapshot is not None else 0)
        self.windows = [WindowRows(pool, index, shape, spare) for index, pool in enumerate(pools[1:]) if pool.kind == "window"]
        self._pools = pools
        self._table = table
        self._checkpoints: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by slot: (tokens, page)
        self._writes: list[list[np.ndarray]] = [[] for _ in allocator.pools[1:]]
        self._loads: dict[int, int] = {}  # by target: source
        self._saves: list[tuple[int, int]] = []

    @property
    def num_cached(self) -> int:
        """The number of these groups of which the prefix cache holds pages."""
        return len(self.windows) + (self.snapshot is not None)

    # room -----------------------------------------------------------------------------------------

    def count_available(self, index: int) -> int:
        """Pages of a group that can be allocated now: free and evictable ones."""
        return self.allocator.count_free(index + 1) + self._count_evictable(index)

    def _count_evictable(self, index: int) -> int:
        return 0 if self.cache is None else self.cache.count_evictable(index)

    @property
    def num_growable(self) -> int:
        """Pages by which rows can grow now in every `window` group."""
        return min((self.count_available(rows.index) for rows in self.windows), default=np.iinfo(np.int32).max)

    def has_room(self, num_tokens: int, growth: int, num_cached: int = 0) -> bool:
        """Whether a further request of `num_tokens` tokens fits beside the running ones, each of
        which may grow by `growth` tokens. `num_cached`: pages of its locked prefix."""
        if self.snapshot is not None and not self.count_available(self.snapshot):
            return False
        if self.block_pool is not None and not self.allocator.count_free(self.block_pool):
            return False
        a = self._table.arrays
        slots = np.flatnonzero(a.num_pages)
        tokens = np.minimum(a.num_tokens[slots] + growth, a.max_num_tokens[slots])
        for rows in self.windows:
            pages = np.minimum(-(-tokens // rows.page_size), rows.width + rows.spare + 1)
            missing = int(np.maximum(pages - (a.num_pages[slots] - rows.first[slots]), 0).sum())
            needed = min(-(-(num_tokens + growth) // rows.page_size), rows.width + rows.spare + 1) - min(num_cached, rows.width)
            if slots.size and missing + needed > self.count_available(rows.index):
                return False
        return True

    def describe_load(self) -> list[dict[str, Any]]:
        """The pages of each group, as `Heartbeat.groups`."""
        load = []
        for index, pool in enumerate(self.allocator.pools[1:]):
            total, evictable = pool.num_pages - 1, 0 if index + 1 == self.block_pool else self._count_evictable(index)
            used = total - self.allocator.count_free(index + 1) - evictable
            load.append({"group": pool.name, "used_pages": used, "total_pages": total, "evictable_pages": evictable})
        return load

    def allocate_pages(self, index: int, num_pages: int) -> np.ndarray | None:
        """Allocate pages of a group, int32 [num_pages], evicting cached ones if necessary; None,
        and no eviction, when too few are available."""
        short = num_pages - self.allocator.count_free(index + 1)
        if short > 0:
            if self.cache is None or short > self.cache.count_evictable(index):
                return None
            self.allocator.free(self.cache.evict_group(index, short))
        return self.allocator.alloc_in(index + 1, num_pages)

    # rows -----------------------------------------------------------------------------------------

    def start_row(self, slot: int, match: Match | None) -> None:
        """Begin the rows of a slot with the pages of a locked match, and its state. The state is
        copied before the slot's first step."""
        for rows in self.windows:
            matched = match.groups[rows.index] if match is not None and match.groups else _NO_PAGES
            rows.pages[slot] = 0
            rows.first[slot] = max(0, len(matched) - rows.width)
            self._write(rows, slot, 0, matched)
        if self.block_pool is not None:
            block = self.allocator.alloc_in(self.block_pool, 1)
            if block is None:
                raise RuntimeError("a request is started without a free block")
            self.blocks[slot] = block[0]
            self._writes[self.block_pool - 1].append(np.array([[slot, 0, block[0]]], np.int32))
        if self.snapshot is None:
            return
        if (pages := self.allocate_pages(self.snapshot, 1)) is None:
            raise RuntimeError("a request is started without a free state")
        self.states[slot] = pages[0]
        source = match.groups[self.snapshot] if match is not None and match.groups else _NO_PAGES
        self._loads[int(pages[0])] = int(source[0]) if len(source) else 0
        self._writes[self.snapshot].append(np.array([[slot, 0, pages[0]]], np.int32))

    def grow_rows(self, slots: np.ndarray, at: np.ndarray, num_pages: int = 1) -> None:
        """Add `num_pages` pages to each slot's rows from entry `at` on; `num_growable` suffices."""
        for rows in self.windows:
            pages = self.allocate_pages(rows.index, len(slots) * num_pages)
            if pages is None:
                raise RuntimeError("the rows of a window group grow beyond its free pages")
            columns = (at[:, None] + np.arange(num_pages)).ravel()
            lines = np.repeat(slots, num_pages)
            rows.pages[lines, columns] = pages
            self._writes[rows.index].append(np.stack((lines, columns, pages), axis=1).astype(np.int32))

    def trim_rows(self) -> None:
        """Free the window pages that no later token of a running request attends to. Pages of the
        prefix cache are unlocked once none of them is needed."""
        a = self._table.arrays
        for rows in self.windows:
            # a step in flight may have counted drafted tokens that are not accepted
            first = rows.find_first(np.minimum(a.num_computed_tokens, a.num_committed_tokens))
            slots = np.flatnonzero((first > rows.first) & (a.num_pages > 0))
            if not slots.size:
                continue
            at = rows.first[slots]
            decodes = (first[slots] == at + 1) & (at >= a.num_shared[slots])  # one private page each: all at once
            for slot in slots[~decodes].tolist():
                self._free_before(rows, slot, int(first[slot]))
            slots, at = slots[decodes], at[decodes]
            pages = rows.pages[slots, at]
            self.allocator.free(pages[pages > 0])
            rows.pages[slots, at] = 0
            rows.first[slots] = at + 1
            self._writes[rows.index].append(np.stack((slots, at, np.zeros_like(at)), axis=1).astype(np.int32))

    def _free_before(self, rows: WindowRows, slot: int, first: int) -> None:
        shared, begin = int(self._table.arrays.num_shared[slot]), int(rows.first[slot])
        if self.cache is not None and begin < shared <= first:
            self.cache.unlock_group(self._table.get_request(slot).handle, rows.index)
        private = rows.pages[slot, max(begin, shared) : first]
        self.allocator.free(private[private > 0])
        self._write(rows, slot, begin, np.zeros(first - begin, np.int32))
        rows.first[slot] = first

    # the prefix cache -----------------------------------------------------------------------------

    def offer(self, slot: int, whole: int, num_computed: int) -> list[np.ndarray]:
        """The pages of a row's first `whole` pages to insert, by group; see `PrefixCache.insert`.
        The slot's checkpoints of up to `num_computed` tokens are no longer its own."""
        shared, offers = int(self._table.arrays.num_shared[slot]), []
        for index in range(len(self._pools) - 1):
            if index == self.snapshot:
                mine = self._checkpoints.pop(slot, [])
                taken = [each for each in mine if each[0] <= num_computed]
                if len(taken) < len(mine):
                    self._checkpoints[slot] = [each for each in mine if each[0] > num_computed]
                offers.append(np.array(taken, np.int32).reshape(-1, 2))
                continue
            rows = next(rows for rows in self.windows if rows.index == index)
            offered = rows.pages[slot, :whole].copy()
            offered[:shared] = 0
            offers.append(offered)
        return offers

    def has_checkpoints(self, slot: int, num_computed: int) -> bool:
        return any(tokens <= num_computed for tokens, _ in self._checkpoints.get(slot, ()))

    def share_rows(self, slot: int, match: Match) -> None:
        """Replace the leading entries of the rows by the locked pages of the prefix cache."""
        whole = len(match.pages)
        for rows in self.windows:
            begin = max(int(rows.first[slot]), whole - rows.width)
            self._write(rows, slot, int(rows.first[slot]), np.zeros(max(0, begin - int(rows.first[slot])), np.int32))
            rows.first[slot] = begin
            self._write(rows, slot, begin, match.groups[rows.index][begin:])

    def release_rows(self, slot: int, whole: int) -> np.ndarray:
        """End the rows. -> the private pages past the first `whole`, the state and checkpoints."""
        a, freed = self._table.arrays, []
        for rows in self.windows:
            begin = max(int(rows.first[slot]), int(a.num_shared[slot]), whole)
            freed.append(rows.pages[slot, begin : a.num_pages[slot]].copy())
            rows.first[slot] = 0
        if self.snapshot is not None:
            freed.append(np.array([page for _, page in self._checkpoints.pop(slot, [])], np.int32))
            freed.append(self.states[slot : slot + 1].copy())
            self.states[slot] = 0
        freed.append(self.blocks[slot : slot + 1].copy())
        self.blocks[slot] = 0
        pages = np.concatenate(freed)
        return pages[pages > 0]

    def private_pages(self, slot: int) -> np.ndarray:
        """The slot's pages that only its request holds, int32."""
        begin, end = int(self._table.arrays.num_shared[slot]), int(self._table.arrays.num_pages[slot])
        windows = [rows.pages[slot, max(int(rows.first[slot]), begin) : end] for rows in self.windows]
        checkpoints = np.array([page for _, page in self._checkpoints.get(slot, ())], np.int32)
        pages = np.concatenate([self.states[slot : slot + 1], self.blocks[slot : slot + 1], *windows, checkpoints])
        return pages[pages > 0]

    def shared_pages(self, slot: int) -> np.ndarray:
        """The slot's pages that the prefix cache owns, int32."""
        shared = int(self._table.arrays.num_shared[slot])
        pages = np.concatenate([_NO_PAGES, *(rows.pages[slot, rows.first[slot] : max(shared, rows.first[slot])] for rows in self.windows)])
        return pages[pages > 0]

    # checkpoints ----------------------------------------------------------------------------------

    def limit_chunk(self, start: int, count: int, end: int, branch: int) -> int:
        """Tokens of a prompt's next chunk, at most `count`, so that it ends where a checkpoint is
        wanted: at `branch`, where another sequence diverges, or at a page boundary before the end
        of the prompt."""
        if self.snapshot is None:
            return count
        if start < branch < start + count:
            return branch - start
        if start + count < end:
            whole = (start + count) // self.page_size * self.page_size
            return whole - start if whole > start else count
        return count

    def save_chunk(self, slot: int, num_tokens: int) -> None:
        """Save the slot's state after the step that is scheduled now, if a match can end there."""
        if self.snapshot is not None and num_tokens % self.page_size == 0 and self.cache is not None:
            self._save(slot, num_tokens)

    def save_decodes(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Save the states of decoding slots, which have `num_tokens` tokens after this step, every
        `interval` tokens. A slot keeps its last checkpoint only."""
        if self.snapshot is None or self.cache is None:
            return
        for row in np.flatnonzero(num_tokens % self.interval == 0).tolist():
            slot = int(slots[row])
            if mine := self._checkpoints.get(slot):
                page = mine.pop()[1]
                mine.append((int(num_tokens[row]), page))
                self._saves.append((int(self.states[slot]), page))
            else:
                self._save(slot, int(num_tokens[row]))

    def limit_drafts(self, num_tokens: np.ndarray) -> np.ndarray | int:
        """The most drafts of rows that have `num_tokens` tokens after a step without drafts: a
        state is saved in such steps alone."""
        if self.snapshot is None or self.cache is None:
            return MAX_STEPS
        beyond: np.ndarray = num_tokens % self.interval
        return np.where(beyond > 0, self.interval - 1 - beyond, 0)

    def _save(self, slot: int, num_tokens: int) -> None:
        index = self.snapshot
        assert index is not None
        # the last states are left to requests that wait
        if self.count_available(index) <= max(1, self.allocator.count_pages(index + 1) // 8):
            return
        if (pages := self.allocate_pages(index, 1)) is not None:
            self._checkpoints[slot].append((num_tokens, int(pages[0])))
            self._saves.append((int(self.states[slot]), int(pages[0])))

    # the step -------------------------------------------------------------------------------------

    def take_writes(self) -> list[np.ndarray]:
        """Return the writes to the groups' page tables since the last call; see
        `ScheduledBatch.group_pages`."""
        taken = []
        for index, writes in enumerate(self._writes):
            joined = np.concatenate([np.empty((0, 3), np.int32), *writes])
            joined[:, 2] = self._number(index, joined[:, 2])
            taken.append(joined)
            writes.clear()
        return taken

    def take_states(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the copies of states before and after the step that is being scheduled; see
        `ScheduledBatch`."""
        if self.snapshot is None:
            return None, None
        copies, index = ([(source, target) for target, source in self._loads.items()], self._saves), self.snapshot
        self._loads, self._saves = {}, []
        return tuple(self._number(index, np.array(pairs, np.int32)) if pairs else None for pairs in copies)  # type: ignore[return-value]

    def uses_states(self, pages: np.ndarray) -> bool:
        """Whether copies of the step that is being scheduled read or write one of these pages."""
        return any(page in pages for copy in (*self._loads.items(), *self._saves) for page in copy)

    def repeat_writes(self, slot: int) -> None:
        """Record the slot's rows as writes again."""
        for rows in self.windows:
            self._write(rows, slot, 0, rows.pages[slot, : self._table.arrays.num_pages[slot]].copy())
        if self.snapshot is not None and self.states[slot]:
            self._writes[self.snapshot].append(np.array([[slot, 0, self.states[slot]]], np.int32))
        if self.block_pool is not None and self.blocks[slot]:
            self._writes[self.block_pool - 1].append(np.array([[slot, 0, self.blocks[slot]]], np.int32))

    def _number(self, index: int, pages: np.ndarray) -> np.ndarray:
        """Numbers within the pool; 0 stays 0."""
        return np.where(pages > 0, pages - self.allocator.first_pages[index + 1], 0).astype(np.int32)

    def _write(self, rows: WindowRows, slot: int, start: int, pages: np.ndarray) -> None:
        if len(pages):
            rows.pages[slot, start : start + len(pages)] = pages
            columns = np.arange(start, start + len(pages))
            self._writes[rows.index].append(np.stack((np.full(len(pages), slot), columns, pages), axis=1).astype(np.int32))
