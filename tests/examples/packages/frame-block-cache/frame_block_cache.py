"""A prefix cache that finds each page by the hash of its tokens and of all tokens before them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
from pydantic import BaseModel

from frame import hookimpl
from frame.core.interfaces.cache import Inserted, Match, PrefixCache, PrefixCacheCapabilities, PrefixCacheContext, SupportsRelock


@hookimpl
def register_prefix_caches(registry) -> None:
    capabilities = PrefixCacheCapabilities(eviction_policy=False)
    registry.add("blocks", f"{__name__}:BlockCache", capabilities=capabilities, summary="Hashed pages, least recently used first.")


class BlockCache(PrefixCache, SupportsRelock):
    """A handle is the hash of a prefix's last page; None: the empty prefix."""

    def __init__(self, context: PrefixCacheContext, options: BaseModel | None = None) -> None:
        self.page_size = context.page_size
        self.pages: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.locks: Counter[bytes] = Counter()
        self.unlocked: OrderedDict[bytes, None] = OrderedDict()  # in the order of eviction: a page follows its successors

    def hashes(self, tokens: np.ndarray, namespace: str) -> Iterator[bytes]:
        digest, size = blake2b(namespace.encode(), digest_size=16).digest(), self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            page = np.ascontiguousarray(tokens[start : start + size], np.int32)
            digest = blake2b(digest + page.tobytes(), digest_size=16).digest()
            yield digest

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        pages, last = [], None
        for digest in self.hashes(tokens, namespace):
            if digest not in self.pages:
                break
            pages.append(self.pages[digest])
            last = digest
        return Match(len(pages) * self.page_size, np.array(pages, np.int32), last)

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        num_cached, last = 0, None
        for number, digest in enumerate(self.hashes(tokens, namespace)):
            if digest in self.pages:
                num_cached += self.page_size
            else:
                self.pages[digest], self.parents[digest] = int(pages[number]), last
            last = digest
        self.release(last)
        return Inserted(num_cached, last)

    def path(self, handle: bytes | None) -> Iterator[bytes]:
        while handle is not None:
            yield handle
            handle = self.parents[handle]

    def release(self, handle: bytes | None) -> None:
        """Make the unlocked pages of a prefix the last to be evicted."""
        for digest in self.path(handle):
            if not self.locks[digest]:
                self.unlocked[digest] = None
                self.unlocked.move_to_end(digest)

    def lock(self, handle: bytes | None) -> None:
        for digest in self.path(handle):
            self.locks[digest] += 1
            self.unlocked.pop(digest, None)

    def unlock(self, handle: bytes | None) -> None:
        self.locks.subtract(self.path(handle))
        self.release(handle)

    def evict(self, num_pages: int) -> np.ndarray:
        gone = [self.unlocked.popitem(last=False)[0] for _ in range(min(num_pages, len(self.unlocked)))]
        for digest in gone:
            del self.parents[digest], self.locks[digest]
        return np.array([self.pages.pop(digest) for digest in gone], np.int32)

    def audit(self) -> Iterator[np.ndarray]:
        yield np.fromiter(self.pages.values(), np.int32)

    def relock(self, handles: Iterable[bytes | None]) -> None:
        self.locks.clear()
        for handle in handles:
            self.lock(handle)
        for digest in reversed(list(self.pages)):
            self.release(digest)

    num_evictable = property(lambda self: len(self.unlocked))
    num_locked = property(lambda self: len(self.pages) - len(self.unlocked))
