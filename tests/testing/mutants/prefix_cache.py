"""Wrong prefix caches, derived from a plain one: a dictionary of prefixes, which evicts the least
recently used."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from frame.core.interfaces.cache import Inserted, Match, PrefixCache, PrefixCacheCapabilities, PrefixCacheContext, SupportsRelock
from frame.plugins.prefix_caches.radix import RadixCache
from tests.testing.mutants import MutantList

Prefix = tuple[str, bytes]


class Entry:
    """One cached page."""

    def __init__(self, page: int, parent: Prefix | None, locked: set[Entry]) -> None:
        self.page, self.parent = page, parent
        self._locked, self._locks = locked, 0
        self.used = self.children = self.priority = 0
        self.last_access = self.created = self.hits = 0

    @property
    def locks(self) -> int:
        return self._locks

    @locks.setter
    def locks(self, locks: int) -> None:
        self._locks = locks
        (self._locked.add if locks > 0 else self._locked.discard)(self)


class PlainCache(PrefixCache, SupportsRelock):
    """A dictionary from each cached prefix of whole pages to its last page. Needs memory and time
    for the square of a sequence's length, so it is for tests alone."""

    def __init__(self, context: PrefixCacheContext, options: Any = None) -> None:
        self.page_size = context.page_size
        self.policy = context.eviction_policy
        self.entries: dict[Prefix, Entry] = {}
        self.locked = set[Entry]()
        self.clock = 0

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        """The keys of all prefixes of whole pages, in order."""
        whole = self.count_pages(tokens)
        raw, size = np.asarray(tokens, np.int32).tobytes(), 4 * self.page_size
        return [(namespace, raw[: size * (page + 1)]) for page in range(whole)]

    def count_pages(self, tokens: np.ndarray) -> int:
        return len(tokens) // self.page_size

    def cached(self, prefixes: list[Prefix]) -> list[Prefix]:
        found = []
        for prefix in prefixes:
            if prefix not in self.entries:
                break
            found.append(prefix)
        return found

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        found = self.cached(self.prefixes(tokens, namespace))
        pages = np.array([self.entries[prefix].page for prefix in found], np.int32)
        return Match(len(found) * self.page_size, pages, found[-1] if found else None)

    def path(self, handle: Prefix | None) -> Iterator[Entry]:
        """The entries from a handle up."""
        while handle is not None:
            entry = self.entries[handle]
            yield entry
            handle = entry.parent

    def lock(self, handle: Prefix | None) -> None:
        self.clock += 1
        for entry in self.path(handle):
            entry.locks += 1
            entry.hits += 1
            entry.last_access = self.clock

    def unlock(self, handle: Prefix | None) -> None:
        for entry in self.path(handle):
            entry.locks -= 1

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        prefixes = self.prefixes(tokens, namespace)
        num_cached = len(self.cached(prefixes))
        self.clock += 1
        for number, prefix in enumerate(prefixes):
            if number >= num_cached:
                self.add(prefix, int(pages[number]), prefixes[number - 1] if number else None)
            entry = self.entries[prefix]
            entry.last_access, entry.priority = self.clock, max(entry.priority, priority)
        return Inserted(num_cached * self.page_size, prefixes[-1] if prefixes else None)

    def add(self, prefix: Prefix, page: int, parent: Prefix | None) -> None:
        entry = self.entries[prefix] = Entry(page, parent, self.locked)
        entry.created = self.clock
        if parent is not None:
            self.entries[parent].children += 1

    def candidates(self) -> list[Prefix]:
        """The unlocked leaves."""
        return [prefix for prefix, entry in self.entries.items() if not entry.children and not entry.locks]

    def evict(self, num_pages: int) -> np.ndarray:
        freed: list[int] = []
        while len(freed) < num_pages and (leaves := self.candidates()):
            freed.append(self.remove(min(leaves, key=self.rank)))
        return np.array(freed, np.int32)

    def rank(self, prefix: Prefix) -> tuple[float, ...]:
        if self.policy is None:
            raise ValueError("a plain cache needs an eviction policy")
        return self.policy.key(self.entries[prefix])

    def remove(self, prefix: Prefix) -> int:
        entry = self.entries.pop(prefix)
        self.locked.discard(entry)
        if entry.parent is not None:
            self.entries[entry.parent].children -= 1
        return entry.page

    def audit(self) -> Iterator[np.ndarray]:
        yield np.array([entry.page for entry in self.entries.values()], np.int32)

    def relock(self, handles: Iterable[Prefix | None]) -> None:
        for entry in self.entries.values():
            entry.locks = 0
        for handle in handles:
            self.lock(handle)

    @property
    def num_locked(self) -> int:
        return len(self.locked)

    @property
    def num_evictable(self) -> int:
        return len(self.entries) - self.num_locked


mutant = MUTANTS = MutantList("prefix_cache", reference=PlainCache, capabilities=PrefixCacheCapabilities())


@mutant
class IgnoresNamespaces(PlainCache):
    """Finds the prefixes of other tenants."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(tokens, "")


@mutant
class NamespaceIsItsOwner(PlainCache):
    """Ignores the salt of a namespace."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(tokens, namespace.partition(":")[0])


@mutant
class ShortTokenIds(PlainCache):
    """Keeps 16 bits of each token id."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(np.asarray(tokens) & 0xFFFF, namespace)


@mutant
class OneKeyForMedia(PlainCache):
    """Takes all negative keys for one placeholder."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(np.maximum(tokens, -1), namespace)


@mutant
class ComparesFloats(PlainCache):
    """Compares token ids as float32, which rounds large ones."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(np.asarray(tokens, np.float32).astype(np.int64), namespace)


@mutant
class PageAloneIsTheKey(PlainCache):
    """Finds a page by its own tokens, not by all tokens before it."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        found, size = super().prefixes(tokens, namespace), 4 * self.page_size
        return [(f"{namespace}/{number}", key[-size:]) for number, (_, key) in enumerate(found)]


@mutant
class RoundsPagesUp(PlainCache):
    """Keeps the last page though it is not full."""

    def count_pages(self, tokens: np.ndarray) -> int:
        return -(-len(tokens) // self.page_size)


@mutant
class MatchLeavesTheLastPage(PlainCache):
    """Never matches a whole sequence."""

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        return super().match(tokens[:-1], namespace)


@mutant
class CountsPagesForTokens(PlainCache):
    """Returns `num_cached` in pages."""

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        found = super().insert(tokens, pages, namespace, priority)
        return Inserted(found.num_cached // self.page_size + bool(found.num_cached), found.handle)


@mutant
class ReplacesCachedPages(PlainCache):
    """Stores the caller's duplicate pages in place of its own."""

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        found = super().insert(tokens, pages, namespace, priority)
        for prefix, page in zip(self.prefixes(tokens, namespace), pages, strict=False):
            self.entries[prefix].page = int(page)
        return found


@mutant
class TakesNewPagesFromTheFront(PlainCache):
    """Stores the first pages of the argument for the tokens that were not cached."""

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        num_cached = len(self.cached(self.prefixes(tokens, namespace)))
        return super().insert(tokens, np.roll(pages, num_cached), namespace, priority)


@mutant
class LocksTheLastPageOnly(PlainCache):
    """Locks the end of a prefix, not its ancestors."""

    def path(self, handle: Prefix | None) -> Iterator[Entry]:
        yield from list(super().path(handle))[:1]


@mutant
class LockIsAFlag(PlainCache):
    """The first `unlock` releases all locks."""

    def unlock(self, handle: Prefix | None) -> None:
        for entry in self.path(handle):
            entry.locks = 0


@mutant
class EvictsLockedPages(PlainCache):
    """Evicts leaves that running requests read."""

    def candidates(self) -> list[Prefix]:
        return [prefix for prefix, entry in self.entries.items() if not entry.children]


@mutant
class EvictsFromTheMiddle(PlainCache):
    """Evicts pages before the ones that follow them."""

    def candidates(self) -> list[Prefix]:
        return [prefix for prefix, entry in self.entries.items() if not entry.locks]

    def remove(self, prefix: Prefix) -> int:
        entry = self.entries.pop(prefix)
        if entry.parent in self.entries:
            self.entries[entry.parent].children -= 1
        return entry.page


@mutant
class EvictsOneTooFew(PlainCache):
    """Returns one page less than was asked for."""

    def evict(self, num_pages: int) -> np.ndarray:
        return super().evict(num_pages - 1)


@mutant
class EvictsWithoutNeed(PlainCache):
    """`evict(0)` evicts a page."""

    def evict(self, num_pages: int) -> np.ndarray:
        return super().evict(max(1, num_pages))


@mutant
class ForgetsEvictedPages(PlainCache):
    """Returns evicted pages and still finds them."""

    def remove(self, prefix: Prefix) -> int:
        entry = self.entries[prefix]
        page = super().remove(prefix)
        if entry.hits:
            self.add(prefix, page, entry.parent)
            self.entries[prefix].locks = 0
        return page


@mutant
class IgnoresItsPolicy(PlainCache):
    """Evicts in the order of insertion, whatever the policy says."""

    def rank(self, prefix: Prefix) -> tuple[float, ...]:
        return (self.entries[prefix].created,)


@mutant
class IgnoresPriorities(PlainCache):
    """Gives all prefixes the same priority."""

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        return super().insert(tokens, pages, namespace)


@mutant
class KeepsAView(PlainCache):
    """Keeps the caller's array of pages, which changes later."""

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        found = super().insert(tokens, pages, namespace, priority)
        new = list(enumerate(self.prefixes(tokens, namespace)))[found.num_cached // self.page_size :]
        self.views = getattr(self, "views", {}) | {prefix: pages[number : number + 1] for number, prefix in new}
        return found

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        found = super().match(tokens, namespace)
        prefixes = self.prefixes(tokens, namespace)[: len(found.pages)]
        return Match(found.num_tokens, np.array([self.views[prefix][0] for prefix in prefixes], np.int32), found.handle)


@mutant
class EvictsLockedPagesWithTheRest(PlainCache):
    """`evict` of everything that is evictable removes locked prefixes, too."""

    def evict(self, num_pages: int) -> np.ndarray:
        if not 0 < self.num_evictable <= num_pages:
            return super().evict(num_pages)
        pages = np.array([entry.page for entry in self.entries.values()], np.int32)
        self.entries.clear()
        return pages


@mutant
class RelockAddsLocks(PlainCache):
    """`relock` keeps the locks that it should replace."""

    def relock(self, handles: Iterable[Prefix | None]) -> None:
        for handle in handles:
            self.lock(handle)


@mutant
class AuditSkipsLockedPages(PlainCache):
    """`audit` yields the evictable pages alone."""

    def audit(self) -> Iterator[np.ndarray]:
        yield np.array([entry.page for entry in self.entries.values() if not entry.locks], np.int32)


@mutant
class CountsLocksForPages(PlainCache):
    """`num_locked` counts a page once for each of its locks."""

    @property
    def num_locked(self) -> int:
        return sum(entry.locks for entry in self.entries.values())


@mutant
class SaysThatItStoresNothing(PlainCache):
    """The class says that it reuses nothing, the record that it does."""

    reuses = False


@mutant
class CallsItselfForEachPage(PlainCache):
    """Locks each page by a call of its own: long sessions end with a RecursionError."""

    def lock(self, handle: Prefix | None) -> None:
        if handle is not None:
            entry = self.entries[handle]
            self.lock(entry.parent)
            entry.locks, entry.hits, entry.last_access = entry.locks + 1, entry.hits + 1, self.clock


class Divided(RadixCache):
    """Loses something where a sequence is divided."""

    lose: Any

    def _split(self, lower: Any, keep: int) -> Any:
        upper = super()._split(lower, keep)
        self.lose(upper, lower)
        return upper


mutant.each(
    Divided, "lose",
    ("BranchesLosePins", "A pin ends where another sequence branches off.", lambda self, _, lower: lower.pins and self._end_pins(lower)),
    ("BranchesLosePriority", "A sequence with a branch has no priority.", lambda _, upper, __: setattr(upper, "priority", 0)),
    ("BranchesLoseHits", "A sequence with a branch has no hits.", lambda _, upper, __: setattr(upper, "hits", 0)),
)  # fmt: skip


@mutant
class CountsMatches(PlainCache):
    """Counts a match as a hit, so that a request that waits long keeps its prefix."""

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        found = super().match(tokens, namespace)
        for entry in self.path(found.handle):
            entry.hits += 1
        return found


@mutant
class DropsColons(PlainCache):
    """Drops the colon of a namespace without an owner."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(tokens, namespace.lstrip(":"))


@mutant
class MergesNormalForms(PlainCache):
    """Compares namespaces in Unicode's compatibility form, in which a ligature is its letters."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(tokens, unicodedata.normalize("NFKC", namespace))


@mutant
class CutsNamespaces(PlainCache):
    """Compares the first 160 characters of a namespace."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(tokens, namespace[:160])


@mutant
class KeepsUsesOfEvictedPages(PlainCache):
    """Keeps the last use of each prefix that was ever locked."""

    def lock(self, handle: Prefix | None) -> None:
        super().lock(handle)
        self.uses = getattr(self, "uses", {}) | {handle: self.clock}
