"""`CacheEvents`: tells subscribers which blocks a prefix cache and its tiers hold.

`KVCacheManager` calls it for each insertion and eviction of any prefix cache, `frame.kv_tiers` for
those of its tiers. It copies what a thread needs, and returns; the thread computes the hashes and
publishes. Must not know requests or a cache's inside.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np

from frame.kv_events.publisher import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event, KVEventPublisher

log = logging.getLogger(__name__)

MAX_BATCH = 1024  # changes
MAX_KEPT = 1 << 16  # hashes of blocks that are written back to tiers
WAIT = 0.05  # seconds until the thread looks for requests for replays
_ROOT, _UNKNOWN = -1, -2  # in place of the page of a parent

Place = tuple[int, str]  # a cache tier and its medium


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that were inserted. keys: cache keys, int32, of these blocks; with the parent
    `_UNKNOWN`, of all blocks from the root."""

    keys: np.ndarray
    pages: np.ndarray  # int32, one a block
    parent: int  # page of the block before the first one; or _ROOT, _UNKNOWN
    namespace: str


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks that a cache tier holds. place: the tier and its medium; names: their keys there.
    keys: cache keys, int32, of their sequence up to the last of them; None: they were written
    back."""

    place: Place
    names: Sequence[bytes]
    keys: np.ndarray | None
    namespace: str


class CacheEvents:
    """The events of a cache with pages below `num_pages`, which is empty."""

    def __init__(self, publisher: KVEventPublisher, num_pages: int, page_size: int, max_waiting: int) -> None:
        self._publisher = publisher
        self._page_size = page_size
        self._is_owned = np.zeros(num_pages, np.bool_)  # pages of the cache
        self._builder = EventBuilder(num_pages, page_size)
        self._max_waiting = max_waiting
        self._has_lost = False
        self._changes: queue.SimpleQueue[Callable[[], Iterator[Event]] | None] = queue.SimpleQueue()
        self._changes.put(self._builder.clear)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def record_inserted(self, keys: np.ndarray, pages: np.ndarray, namespace: str, num_cached: int) -> None:
        """A sequence was inserted, of which `num_cached` tokens were there."""
        size = self._page_size
        first, end = num_cached // size, len(keys) // size
        if first >= end:
            return
        added = pages[first:end].copy()
        parent = _ROOT if not first else int(pages[first - 1])
        if first and not self._is_owned[parent]:  # a duplicate of a page of the cache
            parent = _UNKNOWN
        self._is_owned[added] = True
        start = 0 if parent == _UNKNOWN else first * size
        stored = Stored(np.array(keys[start : end * size], np.int32), added, parent, namespace)
        self._put(lambda: self._builder.store(stored))

    def record_removed(self, pages: np.ndarray) -> None:
        """These pages left the cache; those of other cache groups may be among them."""
        removed = pages[pages < len(self._is_owned)]
        if len(removed):
            self._is_owned[removed] = False
            self._put(lambda: self._builder.remove(removed))

    def record_cleared(self) -> None:
        """The cache is empty."""
        self._is_owned[:] = False
        self._put(self._builder.clear)

    def record_tier_stored(self, place: Place, names: Sequence[bytes], keys: np.ndarray | None, namespace: str) -> None:
        """A tier holds these blocks: see `TierBlocks`. Listed ones are not listed again."""
        stored = TierBlocks(place, names, None if keys is None else np.array(keys, np.int32), namespace)
        self._put(lambda: self._builder.tiers.store(stored))

    def record_tier_removed(self, place: Place, names: Sequence[bytes]) -> None:
        """These blocks left a tier."""
        self._put(lambda: self._builder.tiers.remove(place, names))

    def record_tiers_cleared(self) -> None:
        """No block of a tier is asked any more."""
        self._put(lambda: self._builder.tiers.clear())  # noqa: PLW0108 - of the listing at that time

    def record_written_back(self, pages: np.ndarray, names: Sequence[bytes]) -> None:
        """These pages are about to leave the cache, and go to tiers under these names."""
        self._put(lambda: self._builder.name_pages(pages, names))

    def close(self) -> None:
        """Publish what waits, and end the thread."""
        self._changes.put(None)
        self._thread.join(5)

    def _put(self, change: Callable[[], Iterator[Event]]) -> None:
        if self._changes.qsize() < self._max_waiting:
            if self._has_lost:
                self._has_lost = False
                self._changes.put(self._builder.forget)  # what was there before is not listed any more
            self._changes.put(change)
        elif not self._has_lost:
            self._has_lost = True
            log.warning("KV events: %s changes of the cache wait to be published; subscribers will forget its content", self._max_waiting)

    # the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                changes = [self._changes.get(timeout=WAIT)]
            except queue.Empty:
                changes = []
            while changes and changes[-1] is not None and len(changes) < MAX_BATCH and not self._changes.empty():
                changes.append(self._changes.get())
            is_open = not changes or changes[-1] is not None
            try:
                if events := [event for change in changes if change is not None for event in change()]:
                    self._publisher.publish(events)
                self._publisher.answer_replays()
            except Exception:  # the thread must live on
                log.exception("KV events could not be published")
        self._publisher.close()


class EventBuilder:
    """Makes events of changes. A block's hash is one of 63 bits, of its parent's hash and its
    tokens, the first one's of the namespace: equal in all servers."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._hashes = np.zeros(num_pages, np.int64)  # by page; 0: not listed
        self.tiers = TierListing(page_size)

    def store(self, stored: Stored) -> Iterator[Event]:
        size, count = self._page_size, len(stored.pages)
        parent = hash_root(stored.namespace)
        if stored.parent >= 0:
            parent = int(self._hashes[stored.parent])
            if not parent:  # lost with other changes, as are its children
                return
        hashes: list[int] = []
        for block in stored.keys.reshape(-1, size):
            parent = hash_block(parent, block)
            hashes.append(parent)
        if stored.parent == _UNKNOWN and not (self._hashes == hashes[-count - 1]).any():
            return  # as above: the cache's page of the parent is not listed
        is_first = stored.parent == _ROOT
        above = None if is_first else int(self._hashes[stored.parent]) if stored.parent >= 0 else hashes[-count - 1]
        self._hashes[stored.pages] = hashes[-count:]
        keys = stored.keys[-count * size :]
        extra = _list_extra_keys(keys.reshape(-1, size), stored.namespace if is_first else "")
        yield BlockStored(hashes[-count:], above, np.maximum(keys, 0).tolist(), size, None, MEDIUM_GPU, None, extra)

    def remove(self, pages: np.ndarray) -> Iterator[Event]:
        hashes = self._hashes[pages]
        self._hashes[pages] = 0
        if len(listed := hashes[hashes != 0]):
            yield BlockRemoved(listed.tolist(), MEDIUM_GPU)

    def name_pages(self, pages: np.ndarray, names: Sequence[bytes]) -> Iterator[Event]:
        """Keep the hashes of pages for the tiers that get them."""
        self.tiers.keep_hashes(names, self._hashes[pages].tolist())
        yield from ()

    def clear(self) -> Iterator[Event]:
        """The cache is empty; blocks of tiers stay."""
        left = self._hashes[self._hashes != 0].tolist()
        self._hashes[:] = 0
        if not self.tiers.is_empty:
            if left:
                yield BlockRemoved(left, MEDIUM_GPU)
            return
        yield AllBlocksCleared()

    def forget(self) -> Iterator[Event]:
        """Changes were lost: nothing is listed any more."""
        self._hashes[:] = 0
        self.tiers = TierListing(self._page_size)
        yield AllBlocksCleared()


class TierListing:
    """Which blocks of tiers subscribers know."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._names: dict[Place, dict[bytes, int]] = {}  # by tier: the hashes of its blocks by name
        self._counts: dict[str, Counter[int]] = {}  # by medium: how many names a hash has in its tiers
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # hashes of blocks that were written back

    def keep_hashes(self, names: Sequence[bytes], hashes: Sequence[int]) -> None:
        for name, value in zip(names, hashes, strict=True):
            if value:
                self._kept[name] = value
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def store(self, stored: TierBlocks) -> Iterator[Event]:
        known = self._names.setdefault(stored.place, {})
        if all(name in known for name in stored.names):
            return
        if stored.keys is None:
            hashes = [self._kept.get(name, 0) for name in stored.names]
            added = [value for name, value in zip(stored.names, hashes, strict=True) if value and self._add(stored.place, name, value)]
            if added:
                yield BlockStored(added, None, [], 0, None, stored.place[1], None)  # as vLLM where it does not know the tokens
            return
        blocks = stored.keys.reshape(-1, self._page_size)
        chain = [hash_root(stored.namespace)]
        for block in blocks:
            chain.append(hash_block(chain[-1], block))
        first = len(blocks) - len(stored.names)
        is_new = [self._add(stored.place, name, value) for name, value in zip(stored.names, chain[first + 1 :], strict=True)]
        for start, end in _find_runs(is_new):
            run = blocks[first + start : first + end]
            is_root = first + start == 0
            extra = _list_extra_keys(run, stored.namespace if is_root else "")
            above = None if is_root else chain[first + start]
            hashes = chain[first + start + 1 : first + end + 1]
            yield BlockStored(hashes, above, np.maximum(run, 0).ravel().tolist(), self._page_size, None, stored.place[1], None, extra)

    def _add(self, place: Place, name: bytes, value: int) -> bool:
        """Whether the block is new in its medium."""
        if name in self._names[place]:
            return False
        self._names[place][name] = value
        counts = self._counts.setdefault(place[1], Counter())
        counts[value] += 1
        return counts[value] == 1

    def remove(self, place: Place, names: Iterable[bytes]) -> Iterator[Event]:
        known, counts, removed = self._names.get(place, {}), self._counts.get(place[1], Counter()), []
        for name in names:
            if value := known.pop(name, 0):
                counts[value] -= 1
                if not counts[value]:
                    del counts[value]
                    removed.append(value)
        if removed:
            yield BlockRemoved(removed, place[1])

    def clear(self) -> Iterator[Event]:
        for place, known in self._names.items():
            yield from self.remove(place, list(known))
        self._kept.clear()

    @property
    def is_empty(self) -> bool:
        return not any(self._counts.values())


def _find_runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of true values."""
    start = 0
    for value, group in groupby(flags):
        end = start + sum(1 for _ in group)
        if value:
            yield start, end
        start = end


def hash_root(namespace: str) -> int:
    """What the first blocks of a namespace have in place of a parent's hash."""
    return int.from_bytes(blake2b(namespace.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1


def hash_block(parent: int, keys: np.ndarray) -> int:
    """The hash of a block, above 0."""
    return hash_bytes(parent, keys.tobytes())


def hash_bytes(parent: int, keys: bytes) -> int:
    """The same of int32 keys as bytes."""
    return (int.from_bytes(blake2b(parent.to_bytes(8) + keys, digest_size=8).digest()) >> 1) or 1


def _list_extra_keys(blocks: np.ndarray, namespace: str) -> list[list[str] | None] | None:
    """What tells blocks from those of the same tokens: a salt or tenant for the first one, and the
    keys of media and adapters, which are negative."""
    extra: list[list[str] | None] = [None] * len(blocks)
    for row in np.flatnonzero((blocks < 0).any(axis=1)).tolist():
        extra[row] = [f"key{key}" for key in np.unique(blocks[row][blocks[row] < 0]).tolist()]
    if owner := namespace.rpartition("\0")[0] if "\0" in namespace else namespace:
        name = blake2b(owner.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        extra[0] = [f"space-{name}", *(extra[0] or [])]
    return extra if any(each is not None for each in extra) else None
