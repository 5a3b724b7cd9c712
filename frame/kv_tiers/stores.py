"""`BlockStores`: stores of blocks of the prefix cache to tiers.

A store locks a cached prefix, gets buffers of all tiers that lack its blocks, lets the mover copy
the pages to them, and commits. With the policy `write_back` it has pages that were evicted, and
frees them afterwards. Used by `TierController`. Must not know requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.interfaces.cache import Match
from frame.core.interfaces.kv_tier import KVTierResult
from frame.kv_tiers.block_keys import BlockKeys
from frame.kv_tiers.group_blocks import GroupBlocks
from frame.kv_tiers.tier_set import NO_PAGES, TierSet

if TYPE_CHECKING:
    import torch

LOW, HIGH = 16, 8  # parts of the pages: `write_back` evicts where fewer than 1 / LOW are free, up to 1 / HIGH
MAX_SEEN = 1 << 18  # keys of blocks that were offered once, of which `write_through_selective` keeps note


Origin = tuple[np.ndarray, str]  # cache keys of a sequence, int32, and its namespace


@dataclass(frozen=True, slots=True)
class Commit:
    """Blocks that a tier is to keep. names: of all that it was given, in order; `num_blocks` of
    tokens. first: the place of the first one in the sequence of `origin`."""

    num_blocks: int
    names: Sequence[bytes]
    first: int
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class Store:
    """Pages that are being copied to buffers."""

    match: Match | None  # locked; None: the pages were evicted
    num_blocks: int  # of tokens
    tiers: Mapping[int, Commit]  # by tier: what it is given
    evicted: np.ndarray = field(default_factory=lambda: NO_PAGES)  # int32; freed once they are copied


class BlockStores:
    """Stores under way. Most pages that they lock are `TierSet.max_pages`, unless one long prefix
    has more: it is locked alone. What finds no room is dropped."""

    def __init__(self, tiers: TierSet) -> None:
        self.num_dropped = 0  # blocks that found no room
        self._set = tiers
        self._stores: dict[int, Store] = {}  # by job
        self._commits: dict[tuple[int, int], Commit] = {}  # by tier and job: buffers are full, and the tier keeps them
        self._is_selective = tiers.options.write_policy == "write_through_selective"
        self._is_late = tiers.options.write_policy == "write_back"
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._stores or self._commits)

    @property
    def is_copying(self) -> bool:
        """Whether pages are read."""
        return bool(self._stores)

    def offer(self, chain: BlockKeys, cache_keys: np.ndarray, namespace: str, *, at_once: bool = False) -> None:
        """Store blocks of a sequence. What finds no room is tried again at the next offer.
        cache_keys: those of the chain's blocks, which the prefix cache holds, int32. at_once: also
        those that are offered for the first time."""
        first, count = chain.num_offered, min(len(chain.keys), len(cache_keys) // self._set.page_size)
        if count > first:
            allowed = self._count_seen(chain.keys, first, count) if self._is_selective and not at_once else count
            chain.num_allowed = allowed if chain.num_allowed == first else chain.num_allowed
            chain.num_offered = count
        if self._is_late:
            self._note(chain, cache_keys, namespace)
        elif chain.num_stored < chain.num_allowed:
            chain.num_stored = self._store(chain, cache_keys, namespace)

    def _note(self, chain: BlockKeys, cache_keys: np.ndarray, namespace: str) -> None:
        """Take note of the keys of pages that the prefix cache has now: of all, since a sequence
        that was preempted has other pages, which may be noted for what they held before."""
        noted = self._set.noted
        pages = self._set.kv_manager.cache.match(cache_keys, namespace).pages.tolist()
        for place in range(min(len(pages), len(chain.keys))):
            note = chain.keys[place], place < chain.num_public
            self.num_dropped += noted.get(pages[place], note)[0] != note[0]
            noted[pages[place]] = note

    def write_back(self) -> None:
        """Where few pages are free, evict the next ones, and store those that a tier lacks. What is
        evicted without this, at once, is dropped."""
        if not self._is_late:
            return
        manager, total = self._set.kv_manager, self._set.options.num_pages
        held = sum(len(store.evicted) for store in self._stores.values())
        free = manager.allocator.num_free + held
        if free >= max(1, total // LOW) or held > total // HIGH:
            return
        pages = manager.cache.evict(min(max(1, total // HIGH) - free, manager.cache.num_evictable))
        if not len(pages):
            return
        notes = sorted(
            ((page, *self._set.noted.pop(page)) for page in pages.tolist() if page in self._set.noted), key=lambda note: not note[2]
        )
        kept, keys = np.array([note[0] for note in notes], np.int32), [note[1] for note in notes]
        if self._set.events is not None:
            self._set.events.record_written_back(kept, keys)
        if manager.events is not None:
            manager.events.record_removed(pages)
        gaps = {
            index: (0, end)
            for index, named in enumerate(self._set.tiers)
            if (end := len(notes) if named.is_local else sum(note[2] for note in notes))
        }
        manager.allocator.free(np.setdiff1d(pages, kept if self._begin(keys, kept, None, (0, len(keys)), gaps) else NO_PAGES))

    def _store(self, chain: BlockKeys, cache_keys: np.ndarray, namespace: str) -> int:
        """Store the allowed blocks that a tier lacks. -> the end of those for which there was
        room."""
        first, count = chain.num_stored, chain.num_allowed
        if self._set.groups is not None:
            return self._store_match(self._set.groups, chain, cache_keys, namespace)
        gaps, short, refused = dict[int, tuple[int, int]](), count, 0  # by tier: the blocks that it lacks; the first without room
        for index, named in enumerate(self._set.tiers):
            end = min(count, named.limit_blocks(chain))
            start = first + named.tier.match(chain.keys[first:end]) if first < end else end
            self._set.report_stored(index, chain.keys[first:start], cache_keys[: start * self._set.page_size], namespace)
            room = self._set.count_room(index, is_store=True) if start < end else None
            stop = end if room is None else min(end, start + room)
            self.num_dropped += max(0, end - max(stop, chain.num_refused))  # they are offered again
            refused = max(refused, end if stop < end else 0)
            short = min(short, stop) if stop < end else short
            if start < stop:
                gaps[index] = start, stop
        chain.num_refused = max(chain.num_refused, refused)
        if not gaps:
            return short
        begin, end = min(start for start, _ in gaps.values()), max(end for _, end in gaps.values())
        kept = min(end, begin + self._set.max_pages - sum(store.num_blocks for store in self._stores.values()))
        cache = self._set.kv_manager.cache
        match = cache.match(cache_keys[: max(kept, 0) * self._set.page_size], namespace)
        kept = min(kept, len(match.pages))
        if kept <= begin or self._exceeds_room(match.pages):
            self.num_dropped += end - begin
            return begin
        self.num_dropped += end - kept
        cache.lock(match.handle)
        if not self._begin(chain.keys, match.pages, match, (begin, kept), gaps, (cache_keys, namespace)):
            cache.unlock(match.handle)
        return short if kept == end else min(short, kept)

    def _store_match(self, groups: GroupBlocks, chain: BlockKeys, cache_keys: np.ndarray, namespace: str) -> int:
        """As `_store`, of a model with several cache groups: the longest match of the allowed
        blocks, with its windows and its state. All of them or none."""
        first, cache = chain.num_stored, self._set.kv_manager.cache
        match = cache.match(groups.extend_keys(cache_keys[: chain.num_allowed * self._set.page_size]), namespace)
        end = len(match.pages)
        if end <= first:
            return first
        keys = [*chain.keys[:end], *groups.list_keys(chain.keys, 0, end)]
        gaps: dict[int, tuple[int, int]] = {}
        for index, named in enumerate(self._set.tiers):
            if named.limit_blocks(chain) >= end:
                start = first + named.tier.match(keys[first:])
                held = min(start, end)
                self._set.report_stored(index, keys[first:held], cache_keys[: held * self._set.page_size], namespace)
                if start < len(keys):
                    gaps[index] = min(start, end), len(keys)
        if not gaps:
            return end
        begin = min(start for start, _ in gaps.values())
        if end - begin > self._set.max_pages - sum(store.num_blocks for store in self._stores.values()) or self._exceeds_room(match.pages):
            self.num_dropped += len(keys) - begin
            return first
        cache.lock(match.handle)
        numbers = np.concatenate((match.pages, groups.number_pages(groups.read_pages(match))))
        span, origin = (begin, len(keys)), (cache_keys, namespace)
        if not groups.cache.lock_state(match.handle) or not self._begin(keys, numbers, match, span, gaps, origin):
            cache.unlock(match.handle)
        return end

    def _begin(
        self, keys: Sequence[bytes], numbers: np.ndarray, match: Match | None, span: tuple[int, int], gaps: dict[int, tuple[int, int]],
        origin: Origin | None = None,
    ) -> bool:  # fmt: skip
        """Get buffers and start the copies. numbers: of the blocks of all keys. -> whether there is
        any copy: tiers may hold all blocks, or have no room."""
        job, (begin, end) = self._set.take_job(), span
        rows: dict[int, list[torch.Tensor | None]] = {}
        for index, (start, stop) in gaps.items():
            stop = min(stop, end)
            if start >= stop:
                continue
            buffers = self._set.tiers[index].tier.store(job, keys[start:stop])
            if buffers is None:
                self.num_dropped += stop - start
            else:
                rows[index] = [*[None] * (start - begin), *buffers, *[None] * (end - stop)]
        columns = [column for column in range(end - begin) if any(row[column] is not None for row in rows.values())]
        if not columns:
            for index in rows:
                self._set.tiers[index].tier.finish(job, commit=False)
            return False
        blocks = [[row[column] for column in columns] for row in rows.values()]
        num_tokens = len(keys) if match is None else len(match.pages)
        if origin is not None:
            origin = None if self._set.events is None else (origin[0][: num_tokens * self._set.page_size].copy(), origin[1])
        commits = {}
        for index in rows:
            start, stop = gaps[index][0], min(gaps[index][1], end, num_tokens)
            commits[index] = Commit(max(0, stop - start), keys[start:stop], start, origin)
        evicted = numbers if match is None else NO_PAGES
        self._stores[job] = Store(match, sum(begin + column < num_tokens for column in columns), commits, evicted)
        self._set.mover.store(job, numbers[begin:end][columns], blocks)
        return True

    def end_copy(self, job: int) -> None:
        """The mover has filled the buffers of a store."""
        store = self._stores.pop(job, None)
        if store is None:
            return
        if store.match is not None:
            self._set.kv_manager.cache.unlock(store.match.handle)
        self._set.kv_manager.allocator.free(store.evicted)
        for index, commit in store.tiers.items():
            self._commits[index, job] = commit
            self._set.tiers[index].tier.finish(job, commit=True)

    def take_result(self, index: int, result: KVTierResult) -> None:
        """A tier has kept the blocks of a store."""
        if (index, result.job) in self._commits:
            commit = self._commits.pop((index, result.job))
            count = min(result.num_blocks, commit.num_blocks)
            self._set.counts[index].stored += count * self._set.page_size
            keys, namespace = (None, "") if commit.origin is None else commit.origin
            end = (commit.first + count) * self._set.page_size
            self._set.report_stored(index, commit.names[:count], None if keys is None else keys[:end], namespace)
            self._set.log_error(index, result.error)

    def list_handles(self) -> list[Any]:
        return [store.match.handle for store in self._stores.values() if store.match is not None]

    def list_locked_pages(self) -> list[np.ndarray]:
        """The pages that each store locks."""
        return [store.match.pages for store in self._stores.values() if store.match is not None]

    def list_evicted_pages(self) -> list[np.ndarray]:
        """The pages that each store frees at its end."""
        return [store.evicted for store in self._stores.values()]

    def _exceeds_room(self, pages: np.ndarray) -> bool:
        """Whether these pages and those of the stores under way are too many to lock."""
        if not self._stores:
            return False
        locked = np.unique(np.concatenate([NO_PAGES, pages, *self.list_locked_pages()]))
        return len(locked) > self._set.max_pages

    def _count_seen(self, keys: Sequence[bytes], first: int, count: int) -> int:
        """Take note of offered blocks. -> the end of the leading ones that were offered before."""
        seen, end = self._seen, first
        for at in range(first, count):
            if keys[at] in seen and end == at:
                end = at + 1
            seen[keys[at]] = None
            seen.move_to_end(keys[at])
        while len(seen) > MAX_SEEN:
            seen.popitem(last=False)
        return end
