"""Prefix caches: a trie of pages, and tries with a bug each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.cache import Inserted, Match, PrefixCache, PrefixCacheCapabilities, PrefixCacheContext, SupportsRelock, owner_of
from tests.testing.held_out import Wrong


class Node:
    """A cached page, after those of its parents. The root of a namespace has none."""

    __slots__ = ("children", "key", "locks", "page", "parent")

    def __init__(self, parent: Node | None, key: Any, page: Any) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[Any, Node] = {}
        self.locks = 0


class TrieCache(PrefixCache, SupportsRelock):
    """A page's key in its parent is its tokens. Unlocked pages are in the order of eviction: a page
    comes after all that follow it."""

    capabilities: ClassVar[PrefixCacheCapabilities] = PrefixCacheCapabilities(eviction_policy=False)

    def __init__(self, context: PrefixCacheContext, options: BaseModel | None = None) -> None:
        self.page_size = context.page_size
        self.roots: dict[str, Node] = {}
        self.unlocked: OrderedDict[Node, None] = OrderedDict()
        self.locked: set[Node] = set()

    def make_keys(self, tokens: np.ndarray) -> list[Any]:
        size, data = self.page_size, np.ascontiguousarray(tokens, np.int32).tobytes()
        return [data[start : start + 4 * size] for start in range(0, len(data) - 4 * size + 1, 4 * size)]

    def name_root(self, namespace: str) -> str:
        return namespace

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        node, pages = self.roots.get(self.name_root(namespace)), []
        for key in self.make_keys(tokens) if node is not None else ():
            assert node is not None
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(int(node.page))
        self.touch(node)
        return Match(len(pages) * self.page_size, np.array(pages, np.int32), node if pages else None)

    def insert(
        self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0, groups: Sequence[np.ndarray] = ()
    ) -> Inserted:
        keys = self.make_keys(tokens)
        if not keys:
            return Inserted(0, None)
        node = self.roots.setdefault(self.name_root(namespace), Node(None, self.name_root(namespace), 0))
        num_cached = 0
        for number, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, self.keep_page(pages, number))
                self.unlocked[child] = None
            else:
                num_cached += self.page_size
            node = child
        self.touch(node)
        return Inserted(num_cached, node)

    def keep_page(self, pages: np.ndarray, number: int) -> Any:
        return int(pages[number])

    def walk(self, node: Node | None) -> Iterator[Node]:
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def touch(self, node: Node | None) -> None:
        for each in self.walk(node):
            if not each.locks:
                self.unlocked[each] = None
                self.unlocked.move_to_end(each)

    def lock(self, handle: Node | None) -> None:
        for node in self.walk(handle):
            node.locks += 1
            self.unlocked.pop(node, None)
            self.locked.add(node)

    def unlock(self, handle: Node | None) -> None:
        for node in self.walk(handle):
            node.locks -= 1
            if not node.locks:
                self.locked.discard(node)
        self.touch(handle)

    def evict(self, num_pages: int) -> np.ndarray:
        pages = []
        while len(pages) < num_pages and self.unlocked:
            node = self.unlocked.popitem(last=False)[0]
            self.remove(node)
            pages.append(int(node.page))
        return np.array(pages, np.int32)

    def remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        if node.parent.parent is None and not node.parent.children:
            self.roots.pop(node.parent.key, None)

    def audit(self) -> Iterator[np.ndarray]:
        open_nodes, count, part = list(self.roots.values()), 0, []
        while open_nodes:
            node = open_nodes.pop()
            for child in node.children.values():
                if (child in self.unlocked) != (child.locks == 0) or child.locks < sum(c.locks > 0 for c in child.children.values()):
                    raise RuntimeError(f"page {child.page} has wrong locks")
                part.append(int(child.page))
                open_nodes.append(child)
            if len(part) >= 1000:
                yield np.array(part, np.int32)
                count, part = count + len(part), []
        yield np.array(part, np.int32)
        if count + len(part) != self.num_evictable + self.num_locked:
            raise RuntimeError("the cache owns another number of pages than it counts")

    def relock(self, handles: Iterable[Node | None]) -> None:
        for node in self.locked:
            node.locks = 0
        stale, self.locked = self.locked, set()
        kept = list(handles)
        for handle in kept:
            self.lock(handle)
        depths = sorted((node for node in stale if not node.locks), key=lambda node: -sum(1 for _ in self.walk(node)))
        for node in depths:
            self.unlocked[node] = None
            self.unlocked.move_to_end(node)

    @property
    def num_evictable(self) -> int:
        return len(self.unlocked)

    @property
    def num_locked(self) -> int:
        return len(self.locked)


TWIN = TrieCache
WRONG = Wrong()


@WRONG.add("With pages of more than 16 tokens, prompts that differ late in a page get each other's text: keys have 16 tokens.")
class KeyOfSixteenTokens(TrieCache):
    def make_keys(self, tokens: np.ndarray) -> list[Any]:
        return [key[:64] for key in super().make_keys(tokens)]


@WRONG.add("Prompts whose token ids are equal modulo 65,536 get each other's keys and values: ids are kept in 16 bits.")
class SixteenBitTokens(TrieCache):
    def make_keys(self, tokens: np.ndarray) -> list[Any]:
        return super().make_keys(tokens.astype(np.uint16))


@WRONG.add("Requests with another salt, adapter or image read the same tenant's cached pages: only the owner is compared.")
class OwnerOnly(TrieCache):
    def name_root(self, namespace: str) -> str:
        return owner_of(namespace) or namespace


@WRONG.add("Matches return pages of other requests: the page array of `insert` is kept as a view, which the scheduler reuses.")
class KeepsPageViews(TrieCache):
    def keep_page(self, pages: np.ndarray, number: int) -> Any:
        return pages[number : number + 1].reshape(())


@WRONG.add("A running request loses its prefix to eviction: when one of two users of a prefix unlocks it, it is free.")
class LocksOnce(TrieCache):
    def unlock(self, handle: Node | None) -> None:
        for node in self.walk(handle):
            if node.locks and not any(child.locks for child in node.children.values()):
                node.locks = 0
                self.locked.discard(node)
            else:
                node.locks = max(1, node.locks - 1) if node.locks else 0
        self.touch(handle)


@WRONG.add("A large request is refused though the cache could make room: one call evicts at most 256 pages.")
class EvictsInBatches(TrieCache):
    def evict(self, num_pages: int) -> np.ndarray:
        return super().evict(min(num_pages, 256))


@WRONG.add("Pages are freed twice: the last page, which is only partly filled, is taken by the cache while the request writes on.")
class KeepsPartialPage(TrieCache):
    def make_keys(self, tokens: np.ndarray) -> list[Any]:
        keys = super().make_keys(tokens)
        rest = len(tokens) % self.page_size
        return [*keys, np.ascontiguousarray(tokens[-rest:], np.int32).tobytes()] if rest and keys else keys

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        return super().match(tokens[: len(tokens) // self.page_size * self.page_size], namespace)


@WRONG.add("Requests that share a prefix lose it after a repair: `relock` takes each handle once, however often it is held.")
class RelocksUnique(TrieCache):
    def relock(self, handles: Iterable[Node | None]) -> None:
        super().relock(dict.fromkeys(handles))


@WRONG.add("The server slows down as the cache fills: the number of evictable pages is counted anew each time that it is asked.")
class CountsByWalking(TrieCache):
    @property
    def num_evictable(self) -> int:
        open_nodes, count = list(self.roots.values()), 0
        while open_nodes:
            node = open_nodes.pop()
            open_nodes += node.children.values()
            count += node.parent is not None and not node.locks
        return count


@WRONG.add("Memory grows with every tenant that ever came: the roots of empty namespaces stay.")
class KeepsRoots(TrieCache):
    def remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
