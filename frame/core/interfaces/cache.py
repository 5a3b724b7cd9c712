"""The prefix cache, its eviction order, and the page allocator: laws, no tensors (`cache/1`, `eviction_policy/1`).

A page is an index into the KV pool; token sequences are int32 arrays. Nothing here knows requests, devices or models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np

API = "eviction_policy/1"


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: `num_tokens` (a multiple of the page size) and its pages, in order. `handle` is the cache's own."""

    num_tokens: int
    pages: np.ndarray  # int32 [num_tokens // page_size]
    handle: Any


@dataclass(frozen=True, slots=True)
class Inserted:
    """`num_cached` leading tokens were in the cache before: the caller's pages for the part that it did not take from the cache
    are duplicates, which the caller frees. `handle` names the end of the inserted sequence, unlocked."""

    num_cached: int
    handle: Any


@dataclass(frozen=True, slots=True)
class CachedRun:
    """A run of cached tokens as an operator may see it. `parent` is the index of the run before it in the same list, or -1; `start` and
    `tokens` place it in its sequences; `hidden` counts the runs behind it that the list leaves out; `first_ids` are its first tokens."""

    parent: int
    start: int
    tokens: int
    locks: int
    hits: int
    age: int  # logical clock: how many accesses of the cache ago it was last used
    hidden: int
    namespace: str
    first_ids: list[int]


def owner_of(namespace: str) -> str:
    """The tenant to which a namespace belongs; "" where it belongs to none."""
    owner, colon, _ = namespace.partition(":")
    return owner if colon else ""


class PrefixCache(ABC):
    """Which token sequences have their K and V in which pages. One that never keeps a page sets `reuses` to False:
    its `match` finds nothing and its `insert` calls every page a duplicate.

    Laws:
    - `match` changes nothing that another caller can see but recency; it may find the whole sequence.
    - A locked handle's pages, and those of all its ancestors, are not evicted; `lock` and `unlock` nest.
    - `insert` takes ownership of the pages past `num_cached`; only whole pages are kept; tokens beyond the last whole page
      stay the caller's.
    - Sequences under different `namespace`s never match each other (tenant, adapter, image hash). A namespace is "OWNER:SALT"; one without
      a colon has no owner.
    - `evict(n)` frees at least n pages if that many are evictable, else all that are; `evict(0)` does nothing; it returns pages
      and the caller gives them back to the allocator.
    - num_evictable + num_locked = pages owned; `check_integrity` raises on any breach.
    - A match is good until the next `insert` or `evict`: lock it at once.
    """

    reuses: ClassVar[bool] = True

    @abstractmethod
    def match(self, tokens: np.ndarray, namespace: str = "") -> Match: ...

    @abstractmethod
    def lock(self, handle: Any) -> None: ...

    @abstractmethod
    def unlock(self, handle: Any) -> None: ...

    @abstractmethod
    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted: ...

    @abstractmethod
    def evict(self, num_pages: int) -> np.ndarray: ...

    @abstractmethod
    def reset(self) -> np.ndarray:
        """Forget all unlocked sequences; returns their pages."""

    @abstractmethod
    def audit(self) -> Iterator[np.ndarray]:
        """`check_integrity` a part at a time, so that requests need not wait for the whole: each `next` looks at a bounded part, and yields
        pages that the cache owns, int32, together all of them, in any order. Void when anything but `match` is called in between."""

    def check_integrity(self) -> None:
        """Raise RuntimeError on any breach of the laws, all at once."""
        for _ in self.audit():
            pass

    def outline(self, limit: int) -> list[CachedRun]:
        """Up to `limit` runs for display, parents before children, the lately used first. Requests wait meanwhile, so of a large cache it
        looks at a part. A cache without structure has none."""
        return []

    def relock(self, handles: Iterable[Any]) -> None:
        """Forget all locks and lock these handles instead: the repair of a lost or doubled `unlock`."""
        raise NotImplementedError(f"{type(self).__name__} cannot repair its locks")

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages that `evict` could return now."""

    @property
    @abstractmethod
    def num_locked(self) -> int:
        """Pages owned and locked."""


class EvictableNode(Protocol):
    """What an eviction policy may read of a leaf."""

    last_access: int  # logical clock, larger = later
    created: int
    hits: int
    priority: int


class EvictionPolicy(ABC):
    """The order in which unlocked leaves go: smallest key first. Pure: the key depends on the node alone and changes only when
    the node is touched (matched, inserted, locked), so that a heap may hold it. One whose record has `options` is constructed with them
    as its one argument."""

    @abstractmethod
    def key(self, node: EvictableNode) -> tuple[float, ...]: ...


class PageAllocator(ABC):
    """Hands out pages. `alloc` returns int32 [n] or None, never fewer; `free` of a page that is not out is an error
    that names it. num_free + pages out = capacity, always."""

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @abstractmethod
    def alloc(self, num_pages: int) -> np.ndarray | None: ...

    @abstractmethod
    def free(self, pages: np.ndarray | Sequence[int]) -> None: ...

    @abstractmethod
    def pages_out(self) -> np.ndarray:
        """All pages that are handed out, int32, ascending."""

    @abstractmethod
    def check_integrity(self, held: Iterable[np.ndarray] = ()) -> None:
        """Raise unless `held` (all pages that callers say they hold) are exactly the pages that are out."""
