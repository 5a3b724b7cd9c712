"""The interfaces of prefix caches (kind `prefix_cache`) and eviction policies (kind
`eviction_policy`).

A page is an index into the KV pool; token sequences are int32 arrays. Must not know requests,
devices or models. Every prefix cache derives from `PrefixCache`; the classes named `Supports…` are
optional, and users find them by `isinstance` at construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.cache_groups import PagePool
from frame.core.interfaces.plugin import Reason


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix."""

    num_tokens: int  # a multiple of the page size
    pages: np.ndarray  # int32 [num_tokens // page_size], in order
    handle: Any  # the cache's own, for `lock`
    # Of each further cache group. `window`: int32 [num_tokens // page_size], 0 before the window.
    # `snapshot`: int32 [1], the page of the state after `num_tokens` tokens; [0] if there is none.
    groups: tuple[np.ndarray, ...] = ()
    max_length: int = 0  # with further groups: tokens that the `tokens` group alone could serve


@dataclass(frozen=True, slots=True)
class Inserted:
    """The result of `insert`."""

    num_cached: int  # leading tokens that were cached before; the caller frees its duplicate pages of them
    handle: Any  # the end of the inserted sequence, unlocked
    unused: Sequence[int] = ()  # pages of further groups that were not kept; the caller frees them


@dataclass(frozen=True, slots=True)
class CachedRun:
    """A node of the prefix cache, for display."""

    parent: int  # index of the parent in the same list; -1: none
    start: int  # position of its first token
    tokens: int  # number of its tokens
    locks: int
    hits: int
    age: int  # accesses of the cache since its last use
    hidden: int  # children that the list leaves out
    namespace: str
    first_ids: list[int]  # its first tokens
    groups: dict[str, int] = field(default_factory=dict)  # pages of further cache groups, by `PagePool.name`


def owner_of(namespace: str) -> str:
    """The tenant that a namespace belongs to; "" for none."""
    owner, colon, _ = namespace.partition(":")
    return owner if colon else ""


def add_version(namespace: str, num_updates: int) -> str:
    """A request's namespace for the weights after so many updates: what other weights have computed
    is in another one. No two pairs have the same result."""
    return f"{namespace}\0{num_updates}" if num_updates or "\0" in namespace else namespace


def change_version(namespace: str, num_updates: int) -> str:
    """The same of a result of `add_version`."""
    return add_version(namespace.rpartition("\0")[0] if "\0" in namespace else namespace, num_updates)


@dataclass(frozen=True, slots=True)
class PrefixCacheContext:
    """What a prefix cache is built for."""

    page_size: int  # tokens
    num_pages: int  # of the KV cache, the reserved page 0 included
    eviction_policy: EvictionPolicy | None = None  # set if the record's capabilities ask for one
    pools: tuple[PagePool, ...] = ()  # of all cache groups, the `tokens` group first; one or none: a uniform model


@dataclass(frozen=True, slots=True)
class PrefixCacheRequirements:
    """What a configuration needs of its prefix cache."""

    page_size: int  # tokens
    whole_prompts: bool = False  # each prompt is computed in one step, so that no prefix can be reused


@dataclass(frozen=True, slots=True)
class PrefixCacheCapabilities:
    """What a prefix cache can do. `reuses` must equal the attribute of its class."""

    reuses: bool = True  # it stores prefixes
    eviction_policy: bool = True  # it evicts in the order of the policy that cache.eviction names
    page_sizes: tuple[int, ...] | None = None  # in tokens; None: any
    groups: bool = False  # it serves models with several cache groups

    def unsupported(self, requirements: PrefixCacheRequirements) -> list[Reason]:
        """All reasons why it cannot be used; empty: it can."""
        reasons = []
        if self.page_sizes is not None and requirements.page_size not in self.page_sizes:
            sizes = " or ".join(map(str, self.page_sizes))
            reasons.append(
                Reason(f"stores pages of {sizes} tokens, not of {requirements.page_size}", f"cache.page_size: {self.page_sizes[0]}")
            )
        if self.reuses and requirements.whole_prompts:
            reasons.append(Reason("reuses prefixes, and vectors are pooled from whole prompts, each computed in one step"))
        return reasons


class PrefixCache(ABC):
    """Maps token sequences to the pages of their K and V.

    Contract:
    - `match` changes only recency; it may find the whole sequence.
    - A locked handle's pages, and those of all its ancestors, are not evicted; `lock` and `unlock`
      nest.
    - `insert` takes ownership of the pages past `num_cached`. Only whole pages are kept; the page
      of later tokens stays the caller's.
    - Sequences under different `namespace`s never match each other (tenant, salt, version of the
      weights). A namespace is "OWNER:SALT"; one without a colon has no owner. Adapters and media
      change keys in `tokens` instead.
    - `evict(n)` returns at least n pages if that many are evictable, else all that are; `evict(0)`
      does nothing. The caller frees them.
    - num_evictable + num_locked = pages owned; `audit` raises otherwise. Steps read both: O(1).
    - A match is valid until the next `insert` or `evict`: lock it at once.
    - Arrays that are passed in are views that change later: keep copies. `match` may be given more
      tokens than whole pages, and `insert` more pages.
    - The first pages of `insert` may be the cache's own, from an earlier match.
    - A page number is unique in all cache groups. With several groups (`PrefixCacheContext.pools`)
      a match is the longest that all of them serve: its window pages are present, and its state
      was saved. `evict` returns pages of any group. `lock` also locks the window pages of the
      match.
    """

    reuses: ClassVar[bool] = True  # False: `match` finds nothing, and `insert` returns every page as a duplicate

    def __init__(self, context: PrefixCacheContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def match(self, tokens: np.ndarray, namespace: str = "") -> Match: ...

    @abstractmethod
    def lock(self, handle: Any) -> None: ...

    @abstractmethod
    def unlock(self, handle: Any) -> None: ...

    @abstractmethod
    def insert(
        self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0, groups: Sequence[np.ndarray] = ()
    ) -> Inserted:
        """`groups`, which only models with several cache groups pass: pages of each further group.
        `window`: int32, one entry for each page of the sequence, 0: none. `snapshot`: int32 [n, 2]
        of (number of tokens, page of the state after them)."""

    @abstractmethod
    def evict(self, num_pages: int) -> np.ndarray: ...

    @abstractmethod
    def audit(self) -> Iterator[np.ndarray]:
        """Check the contract in parts of bounded time, so that steps can run in between; raises
        RuntimeError where it is violated. Each part yields pages that the cache owns, int32,
        together all of them, in any order. Invalid once any method but `match` is called in
        between."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages that `evict` could return now."""

    @property
    @abstractmethod
    def num_locked(self) -> int:
        """Pages owned and locked."""


class SupportsCacheGroups(ABC):
    """Optional: serves models with several cache groups. `index`: of a further group, as in
    `Match.groups`. The record says so too (`PrefixCacheCapabilities.groups`)."""

    @abstractmethod
    def read(self, handle: Any) -> Match:
        """The pages of a locked prefix; of further groups, those that are present."""

    @abstractmethod
    def unlock_group(self, handle: Any, index: int) -> None:
        """Release the lock of a locked prefix's window pages only; they are not read any more."""

    def lock_state(self, handle: Any) -> bool:
        """Lock the state at the end of a locked prefix too, until its `unlock`. -> whether it is
        locked: a cache need not be able to, and then no cache tier stores states."""
        return False

    @abstractmethod
    def evict_group(self, index: int, num_pages: int) -> np.ndarray:
        """As `evict`, of a further group; the sequences stay."""

    @abstractmethod
    def count_evictable(self, index: int) -> int:
        """Pages that `evict_group` could return now."""

    @abstractmethod
    def count_locked(self, index: int) -> int:
        """Pages of a further group that are owned and locked."""


class SupportsPins(ABC):
    """Optional: evicts pinned sequences after all others, that of the oldest pin first. Pinned
    pages are evictable; where one is evicted, the pins that end in its node have ended."""

    @abstractmethod
    def pin(self, handle: Any) -> None:
        """Pin a sequence that was matched just now."""

    @abstractmethod
    def unpin(self, handle: Any) -> None:
        """End a pin; one that has ended is no error."""

    @abstractmethod
    def is_pinned(self, handle: Any) -> bool:
        """Whether the pin has not ended."""


class SupportsOutline(ABC):
    """Optional: shows its content."""

    @abstractmethod
    def outline(self, limit: int) -> list[CachedRun]:
        """Up to `limit` nodes for display, parents before children, the most recently used first.
        Reads a bounded part of a large cache, because requests wait meanwhile."""


class SupportsRelock(ABC):
    """Optional: repairs its locks."""

    @abstractmethod
    def relock(self, handles: Iterable[Any]) -> None:
        """Replace all locks by locks of these handles: repairs a missing or repeated `unlock`."""


def evict_all(cache: PrefixCache, num_groups: int = 0) -> np.ndarray:
    """Remove all unlocked sequences, and what is unlocked of the cache's further groups. -> their
    pages."""
    pages = [cache.evict(cache.num_evictable)]
    if isinstance(cache, SupportsCacheGroups):
        pages += [cache.evict_group(index, cache.count_evictable(index)) for index in range(num_groups)]
    return np.concatenate(pages)


def check_integrity(cache: PrefixCache) -> None:
    """Raise RuntimeError if a prefix cache violates its contract."""
    for _ in cache.audit():
        pass


class EvictableNode(Protocol):
    """The fields of a leaf that an eviction policy may read."""

    last_access: int  # logical clock, larger = later
    created: int  # the same clock
    hits: int
    priority: int  # the highest of its requests


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """The cache that an eviction policy is built for."""

    page_size: int  # tokens
    num_pages: int  # of the KV cache


class EvictionPolicy(ABC):
    """The eviction order of unlocked leaves: smallest key first.

    Contract: `key` depends on the node alone and changes only when the node is matched, inserted or
    locked, so that a heap may hold it. It is a tuple of numbers, none of them NaN. After an
    exception or another key, the log names the policy, and the least recently used leaves are
    evicted first.
    """

    def __init__(self, context: EvictionContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def key(self, node: EvictableNode) -> tuple[float, ...]: ...
