"""`radix`: the prefix cache as a radix tree over whole pages, one tree for each namespace
(SGLang: `RadixCache`).

A node holds a run of tokens and their pages; children are found by the tokens of their first page.
A node is split where two sequences diverge. The split keeps the lower node's identity, so a handle
that names the end of a sequence stays valid. The cache must not know requests or devices.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.cache import (
    CachedRun,
    Inserted,
    Match,
    PrefixCache,
    PrefixCacheContext,
    SupportsCacheGroups,
    SupportsOutline,
    SupportsPins,
    SupportsRelock,
)
from frame.plugins.prefix_caches.radix_groups import SnapshotGroup, WindowGroup, make_groups
from frame.plugins.prefix_caches.radix_nodes import Handle, Node, outline_tree

_NO_PAGES = np.empty(0, np.int32)
_PINNED = "\0"  # in place of an owner: the heap of pinned leaves
_AUDITED = 256  # nodes that one part of an audit checks: about a millisecond


class RadixCache(PrefixCache, SupportsCacheGroups, SupportsOutline, SupportsPins, SupportsRelock):
    """A radix tree over pages with locks, and a heap of unlocked leaves for each owner, in the
    order of the eviction policy.

    Pages of the owner with most evictable ones are evicted first, so a tenant evicts its own
    prefixes before those of a tenant that has fewer. Leaves with pins are in a heap of their own,
    which is used when no other leaf is left.

    Costs: `match` and `insert` O(tokens), compared by runs; `lock` and `unlock` O(nodes on the
    path); `evict` O(log leaves) amortised for each node: invalid heap entries are dropped when they
    are met, and the heaps are rebuilt when they hold more than twice the nodes. The last evicted
    leaf is trimmed from its end rather than removed.
    """

    def __init__(self, context: PrefixCacheContext, options: BaseModel | None = None) -> None:
        if context.eviction_policy is None:
            raise ValueError("the radix cache evicts in the order of an eviction policy, and its context has none")
        self._page_size = context.page_size
        self._policy = context.eviction_policy
        self._roots: dict[str, Node] = {}
        self._heaps: dict[str, list[tuple[tuple[float, ...], int, int, Node]]] = {}  # by owner
        self._evictable_of: Counter[str] = Counter()  # pages, by owner
        self._clock = 0
        self._entries = 0  # makes heap entries comparable
        self._num_nodes = 0
        self._num_evictable = 0
        self._num_locked = 0
        self._num_pins = 0
        self._groups = make_groups(context.pools, context.page_size)

    # PrefixCache ----------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        path, last = self._walk(self._key(tokens), namespace)
        if not path:
            return Match(0, _NO_PAGES, None)
        pages = np.concatenate([*(node.pages for node in path[:-1]), path[-1].pages[:last]])
        if self._groups:
            return self._match_groups(path, pages, len(tokens))
        return Match(len(pages) * self._page_size, pages, Handle(path[-1], len(pages)))

    def _match_groups(self, path: list[Node], pages: np.ndarray, num_tokens: int) -> Match:
        """The longest part of a match that all groups serve."""
        served = np.ones(len(pages) + 1, np.bool_)
        for group in self._groups:
            group.mark_served(path, num_tokens, served)
        end, max_length = int(np.flatnonzero(served)[-1]), min(len(pages), (num_tokens - 1) // self._page_size) * self._page_size
        if not end:
            return Match(0, _NO_PAGES, None, max_length=max_length)
        node = next(node for node in path if node.end >= end)
        groups = tuple(group.read(path, end) for group in self._groups)
        return Match(end * self._page_size, pages[:end], Handle(node, end), groups, max_length)

    def read(self, handle: Handle) -> Match:
        path = self._path(handle.node)
        groups = tuple(group.read(path, handle.end) for group in self._groups)
        return Match(handle.end * self._page_size, np.concatenate([node.pages for node in path]), handle, groups)

    def lock(self, handle: Handle | None) -> None:
        if handle is None:
            return
        handle.node = self._node_at(handle)
        self._clock += 1
        node: Node | None = handle.node
        while node is not None and node.parent is not None:
            if node.refs == 0:
                self._count_evictable(node.owner, -len(node.pages))
                self._num_locked += len(node.pages)
            node.refs += 1
            node.hits += 1
            node.last_access = self._clock
            node.version += 1  # its heap entry, if any, is invalid now
            node = node.parent
        for group in self._groups:
            if isinstance(group, WindowGroup):
                first = max(0, handle.end - group.width)
                self._split_at(handle.node, first)
                group.lock(self._locked_nodes(handle, first))
                handle.groups.append(group.index)

    def lock_state(self, handle: Handle) -> bool:
        states = [group for group in self._groups if isinstance(group, SnapshotGroup)]
        if not all(group.lock(handle.node, handle.end) for group in states):
            return False
        handle.groups += [group.index for group in states]
        return True

    def unlock_group(self, handle: Handle | None, index: int) -> None:
        if handle is not None and index in handle.groups:
            group = self._groups[index]
            handle.groups.remove(index)
            if isinstance(group, WindowGroup):
                group.unlock(self._locked_nodes(handle, max(0, handle.end - group.width)))
            elif isinstance(group, SnapshotGroup):
                group.unlock(handle.node, handle.end)

    def unlock(self, handle: Handle | None) -> None:
        if handle is None:
            return
        node: Node | None = handle.node
        if node is None or node.refs == 0 or node.end != handle.end:
            raise RuntimeError("a prefix is unlocked that is not locked")
        for index in list(handle.groups):
            self.unlock_group(handle, index)
        while node is not None and node.parent is not None:
            node.refs -= 1
            if node.refs == 0:
                self._num_locked -= len(node.pages)
                self._count_evictable(node.owner, len(node.pages))
                self._push_if_evictable(node)
            node = node.parent

    def insert(
        self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0, groups: Sequence[np.ndarray] = ()
    ) -> Inserted:
        key = self._key(tokens)
        num_pages = len(key) // self._page_size
        if len(pages) < num_pages:
            raise ValueError(f"{len(tokens)} tokens fill {num_pages} pages, but {len(pages)} were given")
        if num_pages == 0:
            return Inserted(0, None, [page for _, page in chain.from_iterable(saved.tolist() for saved in groups if saved.ndim == 2)])
        path, last = self._walk(key, namespace)
        if path and last < len(path[-1].pages):
            path[-1] = self._split(path[-1], last)
        cached = path[-1].end if path else 0
        self._clock += 1
        if cached < num_pages:
            path.append(self._append(path[-1] if path else None, key, pages, namespace, cached))
        for node in path:
            node.last_access = self._clock
            node.priority = max(node.priority, priority)
        self._push_if_evictable(path[-1])
        unused = [page for group, group_pages in zip(self._groups, groups, strict=False) for page in group.adopt(path, group_pages)]
        return Inserted(cached * self._page_size, Handle(path[-1], num_pages), unused)

    def evict_group(self, index: int, num_pages: int) -> np.ndarray:
        return self._groups[index].evict(num_pages)

    def count_evictable(self, index: int) -> int:
        return self._groups[index].num_evictable

    def count_locked(self, index: int) -> int:
        return self._groups[index].num_locked

    def evict(self, num_pages: int) -> np.ndarray:
        freed: list[np.ndarray] = []
        while num_pages > 0 and (victim := self._next_victim()) is not None:
            node, maximum = victim
            if node.pins:
                self._end_pins(node)
                continue
            keep = max(0, len(node.pages) - min(num_pages, maximum))
            num_pages -= len(node.pages) - keep
            freed += [group.cut(node, keep) for group in self._groups]
            if keep:
                freed.append(self._trim(node, keep))
            else:
                heapq.heappop(self._heaps[node.owner])
                freed.append(node.pages)
                self._remove(node)
                if not self._heaps.get(node.owner, True):
                    del self._heaps[node.owner]  # or those of all tenants that ever came would stay
        self._compact()
        return np.concatenate(freed) if freed else _NO_PAGES

    def _next_victim(self) -> tuple[Node, int] | None:
        """The next leaf to evict, of the owner with most evictable pages, and how many of its pages
        may be evicted before another owner has more. That number has a margin, because trimming a
        leaf copies it."""
        if not self._num_evictable:
            return None
        ranked = self._evictable_of.most_common(None if self._num_pins else 2)
        for place, (owner, count) in enumerate(ranked):
            if (node := self._find_first(owner)) is not None:
                others = ranked[place + 1 : place + 2]
                return node, count - others[0][1] + max(1, count // 8) if others else count
        pinned = self._find_first(_PINNED)
        return None if pinned is None else (pinned, 0)

    def _find_first(self, heap_name: str) -> Node | None:
        """The first leaf of a heap, without its invalid entries."""
        heap = self._heaps.get(heap_name, [])
        while heap and (heap[0][2] != heap[0][3].version or not _is_evictable(heap[0][3])):
            heapq.heappop(heap)
        if not heap:
            self._heaps.pop(heap_name, None)
        return heap[0][3] if heap else None

    # pins -----------------------------------------------------------------------------------------

    def pin(self, handle: Handle) -> None:
        node = handle.node = self._node_at(handle)
        self._clock += 1
        node.pins = {**(node.pins or {}), handle: self._clock}
        self._num_pins += 1
        self._push_if_evictable(node)

    def unpin(self, handle: Handle) -> None:
        node = handle.node
        if node.pins and node.pins.pop(handle, None) is not None:
            self._num_pins -= 1
            self._push_if_evictable(node)

    def is_pinned(self, handle: Handle) -> bool:
        return bool(handle.node.pins) and handle in (handle.node.pins or ())

    def _end_pins(self, node: Node) -> None:
        self._num_pins -= len(node.pins or ())
        node.pins = None
        self._push_if_evictable(node)

    def _count_evictable(self, owner: str, change: int) -> None:
        self._num_evictable += change
        self._evictable_of[owner] += change
        if not self._evictable_of[owner]:
            del self._evictable_of[owner]

    def outline(self, limit: int) -> list[CachedRun]:
        def count_pages(node: Node) -> dict[str, int]:
            return {group.name: len(group.list_pages(node)) for group in self._groups}

        return outline_tree(self._roots, limit, self._page_size, self._clock, count_pages)

    def relock(self, handles: Iterable[Any]) -> None:
        for node in self._nodes():
            node.refs = 0
            node.version += 1
        for group in self._groups:
            if isinstance(group, WindowGroup | SnapshotGroup):
                group.clear_locks(self._nodes())
        self._num_evictable, self._num_locked = self._num_evictable + self._num_locked, 0
        self._evictable_of = Counter()
        for node in self._nodes():
            self._evictable_of[node.owner] += len(node.pages)
        for handle in handles:
            if handle is None:
                continue
            locks_state = any(isinstance(self._groups[index], SnapshotGroup) for index in handle.groups)
            handle.groups = []
            self.lock(handle)
            if locks_state:
                self.lock_state(handle)
        self._rebuild_heaps()

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def num_locked(self) -> int:
        return self._num_locked

    def audit(self) -> Iterator[np.ndarray]:
        nodes, heap = self._nodes(), chain.from_iterable(self._heaps.values())
        offered: set[int] = set()
        while batch := list(islice(heap, _AUDITED)):
            offered.update(id(node) for _, _, version, node in batch if version == node.version)
            yield _NO_PAGES
        evictable = locked = num_nodes = num_pins = 0
        held = [0] * len(self._groups)
        seen = np.zeros(64, np.bool_)  # by page
        while run := list(islice(nodes, _AUDITED)):
            for node in run:
                self._check_node(node, offered)
            pages = np.concatenate([node.pages for node in run])
            if (maximum := int(pages.max())) >= len(seen):
                seen = np.concatenate((seen, np.zeros(max(maximum + 1 - len(seen), len(seen)), np.bool_)))
            seen[pages] = True
            unlocked = sum(len(node.pages) for node in run if node.refs == 0)
            num_pins += sum(len(node.pins or ()) for node in run)
            evictable, locked, num_nodes = evictable + unlocked, locked + len(pages) - unlocked, num_nodes + len(run)
            further = [[group.list_pages(node) for node in run] for group in self._groups]
            held = [count + sum(map(len, lists)) for count, lists in zip(held, further, strict=True)]
            yield np.concatenate([pages, *chain.from_iterable(further)])
        _require(num_nodes == self._num_nodes, f"the tree has {num_nodes} nodes, counted {self._num_nodes}")
        _require(evictable == self._num_evictable, f"{evictable} pages are evictable, counted {self._num_evictable}")
        _require(locked == self._num_locked, f"{locked} pages are locked, counted {self._num_locked}")
        _require(int(np.count_nonzero(seen)) == evictable + locked, "a page is owned twice")
        _require(all(root.children for root in self._roots.values()), "an empty namespace is kept")
        entries = self._num_entries()
        _require(entries <= 2 * self._num_nodes + 64, f"the heaps hold {entries} entries for {self._num_nodes} nodes")
        _require(self._evictable_of.total() == evictable, "the evictable pages of all owners are not those of the tree")
        counted = [group.num_evictable + group.num_locked for group in self._groups]
        _require(num_pins == self._num_pins, f"the nodes have {num_pins} pins, counted {self._num_pins}")
        _require(held == counted, f"the nodes hold {held} pages of further groups, counted {counted}")

    def _check_node(self, node: Node, offered: set[int]) -> None:
        parent = _parent(node)
        _require(parent.children.get(self._first(node.key)) is node, "a node is not its parent's child")
        _require(node.end == parent.end + len(node.pages), "a node ends elsewhere than its pages say")
        _require(len(node.pages) > 0 and len(node.key) == len(node.pages) * self._page_size, "a node's tokens do not fill its pages")
        _require(parent.parent is None or parent.refs >= node.refs, "a node is locked more often than its parent")
        _require(not _is_evictable(node) or id(node) in offered, "an unlocked leaf is in no eviction heap")

    # keys: how two sequences are compared ---------------------------------------------------------

    def _key(self, tokens: np.ndarray) -> np.ndarray:
        """The tree's key of `tokens`: int32, cut to whole pages."""
        whole = len(tokens) // self._page_size * self._page_size
        return np.asarray(tokens[:whole], np.int32)

    def _first(self, key: np.ndarray, page: int = 0) -> bytes:
        """The tokens of one page as bytes: the key under which a parent stores a child is that of
        the child's first page."""
        start = page * self._page_size
        return key[start : start + self._page_size].tobytes()

    def _common(self, left: np.ndarray, right: np.ndarray) -> int:
        """Length of the common prefix of two keys, in whole pages."""
        length = min(len(left), len(right))
        differs = left[:length] != right[:length]
        where = int(differs.argmax()) if length else 0
        same = length if length == 0 or not differs[where] else where
        return same // self._page_size

    # the tree -------------------------------------------------------------------------------------

    def _walk(self, key: np.ndarray, namespace: str) -> tuple[list[Node], int]:
        """The nodes along `key`, and how many pages of the last one match it (at least 1)."""
        path: list[Node] = []
        node = self._roots.get(namespace)
        last = at = 0
        num_pages = len(key) // self._page_size
        while node is not None and at < num_pages:
            node = node.children.get(self._first(key, at))
            if node is None:
                break
            last = self._common(node.key, key[at * self._page_size :])
            path.append(node)
            at += last
            if last < len(node.pages):
                break
        return path, last

    def _node_at(self, handle: Handle) -> Node:
        """The node that ends exactly at the handle; splits a node if necessary. Nodes may have been
        split since the match."""
        node = handle.node
        while node.parent is not None and node.parent.end >= handle.end:
            node = node.parent
        if node.parent is None or node.end < handle.end:
            raise RuntimeError("a matched prefix was evicted before it was locked")
        keep = handle.end - node.parent.end
        return self._split(node, keep) if keep < len(node.pages) else node

    def _path(self, node: Node) -> list[Node]:
        """The nodes from the root to `node`."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _split_at(self, node: Node, end: int) -> None:
        """Make `end` pages from the root the end of a node above `node`, or the root."""
        while node.parent is not None and node.parent.end > end:
            node = node.parent
        if node.parent is not None and node.parent.end < end:
            self._split(node, end - node.parent.end)

    def _locked_nodes(self, handle: Handle, first: int) -> list[Node]:
        """The nodes of a locked prefix after its first `first` pages."""
        return [node for node in self._path(handle.node) if node.end > first]

    def _split(self, lower: Node, keep: int) -> Node:
        """Split `lower` after `keep` pages; returns the new upper node. Both parts are copies, so
        neither keeps the other's memory."""
        parent, cut = _parent(lower), keep * self._page_size
        upper = Node(parent, lower.key[:cut].copy(), lower.pages[:keep].copy(), lower.namespace)
        upper.refs, upper.hits, upper.priority = lower.refs, lower.hits, lower.priority
        upper.last_access, upper.created = lower.last_access, lower.created
        parent.children[self._first(upper.key)] = upper
        lower.key, lower.pages, lower.parent = lower.key[cut:].copy(), lower.pages[keep:].copy(), upper
        upper.children[self._first(lower.key)] = lower
        self._num_nodes += 1
        upper.group_data = [None] * len(self._groups)
        for group in self._groups:
            group.split(upper, lower, keep)
        return upper

    def _append(self, parent: Node | None, key: np.ndarray, pages: np.ndarray, namespace: str, cached: int) -> Node:
        if parent is None:
            parent = self._roots.setdefault(namespace, Node(None, _NO_PAGES, _NO_PAGES, namespace))
        num_pages = len(key) // self._page_size
        node = Node(parent, key[cached * self._page_size :].copy(), np.array(pages[cached:num_pages], np.int32), namespace)
        node.created = self._clock
        node.group_data = [group.empty(len(node.pages)) for group in self._groups]
        parent.children[self._first(node.key)] = node
        self._num_nodes += 1
        self._count_evictable(node.owner, len(node.pages))
        return node

    def _remove(self, node: Node) -> None:
        parent = _parent(node)
        del parent.children[self._first(node.key)]
        node.parent = None
        node.version += 1
        self._num_nodes -= 1
        self._count_evictable(node.owner, -len(node.pages))
        if parent.parent is not None:
            self._push_if_evictable(parent)
        elif not parent.children:
            self._roots.pop(parent.namespace, None)

    def _trim(self, node: Node, keep: int) -> np.ndarray:
        """Evict a leaf's pages past its first `keep`; it keeps its heap entry. -> the pages."""
        freed = node.pages[keep:]
        node.pages, node.key = node.pages[:keep].copy(), node.key[: keep * self._page_size].copy()
        node.end -= len(freed)
        self._count_evictable(node.owner, -len(freed))
        return freed

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    # the heap -------------------------------------------------------------------------------------

    def _push_if_evictable(self, node: Node) -> None:
        """Add a node to the eviction heap under its current key, if it is an unlocked leaf."""
        if not _is_evictable(node):
            return
        node.version += 1
        self._push(node)
        self._compact()

    def _push(self, node: Node) -> None:
        self._entries += 1
        heap_name, key = (_PINNED, (float(max(node.pins.values())),)) if node.pins else (node.owner, self._policy.key(node))
        heapq.heappush(self._heaps.setdefault(heap_name, []), (key, self._entries, node.version, node))

    def _num_entries(self) -> int:
        return sum(map(len, self._heaps.values()))

    def _compact(self) -> None:
        """Rebuild the heaps when invalid entries take too much memory."""
        if self._num_entries() > 2 * self._num_nodes + 64:
            self._rebuild_heaps()

    def _rebuild_heaps(self) -> None:
        self._heaps = {}
        for node in self._nodes():
            if _is_evictable(node):
                self._push(node)


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise RuntimeError("a node that has left the radix tree is used")
    return node.parent


def _is_evictable(node: Node) -> bool:
    return node.refs == 0 and not node.children and node.parent is not None


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise RuntimeError(f"the radix cache is inconsistent: {sentence}")
