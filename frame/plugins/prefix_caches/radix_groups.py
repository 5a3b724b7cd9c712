"""What the nodes of a radix tree hold of further cache groups: window pages and states.

A node of the tree always has the pages of the `tokens` group. Of a `window` group it has some of
its pages, or none: the others are tombstones. Of a `snapshot` group it has states at some of its
positions. Each group has its own order of eviction, least recently used first. Used by
`frame.plugins.prefix_caches.radix`. Must not know requests, devices or layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from frame.core.interfaces.cache_groups import PagePool

_NO_PAGES = np.empty(0, np.int32)


class GroupedNode(Protocol):
    """The fields of a tree's node that groups use. `group_data`: one entry for each further
    group."""

    pages: np.ndarray
    end: int
    group_data: list[Any]
    children: dict[bytes, Any]


class Group(ABC):
    """One further group: `index` is its place in `Node.group_data`."""

    num_evictable = 0  # pages that `evict` could return
    num_locked = 0

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name  # `PagePool.name`

    @abstractmethod
    def empty(self, num_pages: int) -> Any:
        """The data of a node of `num_pages` pages that holds nothing of the group."""

    @abstractmethod
    def mark_served(self, path: Sequence[GroupedNode], num_tokens: int, served: np.ndarray) -> None:
        """Clear the entries of `served`, bool [pages of the path + 1], at which a match of a
        sequence of `num_tokens` tokens cannot end. Entry 0 is never cleared."""

    @abstractmethod
    def read(self, path: Sequence[GroupedNode], end: int) -> np.ndarray:
        """The group's pages of a match that ends after `end` pages; see `Match.groups`."""

    @abstractmethod
    def adopt(self, path: Sequence[GroupedNode], offered: np.ndarray) -> list[int]:
        """Keep the offered pages where the path has none. -> those that are not kept."""

    @abstractmethod
    def split(self, upper: GroupedNode, lower: GroupedNode, keep: int) -> None:
        """`upper` gets the first `keep` pages of `lower`, whose fields are already those of its
        rest."""

    @abstractmethod
    def cut(self, node: GroupedNode, keep: int) -> np.ndarray:
        """Remove what the node holds past its first `keep` pages. Called before its fields
        change."""

    @abstractmethod
    def evict(self, num_pages: int) -> np.ndarray:
        """Remove up to `num_pages` pages that are not locked, the least recently used first."""

    @abstractmethod
    def list_pages(self, node: GroupedNode) -> np.ndarray:
        """All pages that the node holds, int32."""


class WindowPages:
    """`pages`: int32, one entry for each page of the node; 0: tombstone."""

    __slots__ = ("pages", "refs")

    def __init__(self, pages: np.ndarray, refs: int = 0) -> None:
        self.pages = pages
        self.refs = refs

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.pages))


class WindowGroup(Group):
    """A match ends where the pages of the window before it are all present."""

    def __init__(self, index: int, name: str, window: int, page_size: int) -> None:
        super().__init__(index, name)
        self.width = -(-window // page_size)  # pages that a match needs, at most
        self._order: OrderedDict[GroupedNode, None] = OrderedDict()  # nodes with pages and without locks

    def empty(self, num_pages: int) -> WindowPages:
        return WindowPages(np.zeros(num_pages, np.int32))

    def mark_served(self, path: Sequence[GroupedNode], num_tokens: int, served: np.ndarray) -> None:
        pages = np.concatenate([self._data(node).pages for node in path])[: len(served) - 1]
        ends = np.arange(1, len(pages) + 1)
        last_absent = np.maximum.accumulate(np.where(pages == 0, ends, 0))
        served[1:] &= ends - last_absent >= np.minimum(ends, self.width)

    def read(self, path: Sequence[GroupedNode], end: int) -> np.ndarray:
        pages = np.concatenate([self._data(node).pages for node in path])[:end]
        pages[: max(0, end - self.width)] = 0
        return pages

    def adopt(self, path: Sequence[GroupedNode], offered: np.ndarray) -> list[int]:
        unused: list[int] = []
        for node in path:
            data, offer = self._data(node), offered[node.end - len(node.pages) : node.end]
            if offer.any():
                takes = (data.pages == 0) & (offer > 0)
                unused += offer[(offer > 0) & ~takes].tolist()
                self._count(data, int(np.count_nonzero(takes)))
                data.pages[takes] = offer[takes]
            self._touch(node, data)
        return unused

    def split(self, upper: GroupedNode, lower: GroupedNode, keep: int) -> None:
        data = self._data(lower)
        upper.group_data[self.index] = above = WindowPages(data.pages[:keep].copy(), data.refs)
        data.pages = data.pages[keep:].copy()
        self._touch(upper, above)
        self._touch(lower, data)

    def cut(self, node: GroupedNode, keep: int) -> np.ndarray:
        data = self._data(node)
        gone, data.pages = data.pages[keep:], data.pages[:keep].copy()
        gone = gone[gone > 0]
        self._count(data, -len(gone))
        self._touch(node, data)
        return gone

    def evict(self, num_pages: int) -> np.ndarray:
        freed: list[np.ndarray] = []
        while num_pages > 0 and self._order:
            node = next(iter(self._order))
            data = self._data(node)
            places = np.flatnonzero(data.pages)[:num_pages]  # the end of a run serves more matches than its beginning
            freed.append(data.pages[places])
            data.pages[places] = 0
            num_pages -= len(places)
            self.num_evictable -= len(places)
            if not data.pages.any():
                del self._order[node]
        return np.concatenate(freed) if freed else _NO_PAGES

    def list_pages(self, node: GroupedNode) -> np.ndarray:
        pages = self._data(node).pages
        return pages[pages > 0]

    def lock(self, nodes: Sequence[GroupedNode]) -> None:
        for node in nodes:
            data = self._data(node)
            if data.refs == 0:
                self._move(data.count)
                self._order.pop(node, None)
            data.refs += 1

    def unlock(self, nodes: Sequence[GroupedNode]) -> None:
        for node in nodes:
            data = self._data(node)
            data.refs -= 1
            if data.refs == 0:
                self._move(-data.count)
            self._touch(node, data)

    def clear_locks(self, nodes: Iterator[GroupedNode]) -> None:
        for node in nodes:
            data = self._data(node)
            if data.refs:
                data.refs = 0
                self._move(-data.count)
                self._touch(node, data)

    def _data(self, node: GroupedNode) -> WindowPages:
        data: WindowPages = node.group_data[self.index]
        return data

    def _move(self, count: int) -> None:
        """`count` pages become locked."""
        self.num_evictable -= count
        self.num_locked += count

    def _count(self, data: WindowPages, change: int) -> None:
        if data.refs:
            self.num_locked += change
        else:
            self.num_evictable += change

    def _touch(self, node: GroupedNode, data: WindowPages) -> None:
        """Make the node the most recently used one, if its pages may be evicted."""
        if data.refs == 0 and data.pages.any():
            self._order[node] = None
            self._order.move_to_end(node)
        else:
            self._order.pop(node, None)


class SnapshotGroup(Group):
    """A match ends where a state was saved. `Node.group_data`: page of the state by its position,
    in pages from the root."""

    def __init__(self, index: int, name: str, page_size: int) -> None:
        super().__init__(index, name)
        self._page_size = page_size
        self._order: OrderedDict[int, tuple[GroupedNode, int]] = OrderedDict()  # by page that is not locked: its node and position
        self._locks: Counter[int] = Counter()  # by page

    def empty(self, num_pages: int) -> dict[int, int]:
        return {}

    def mark_served(self, path: Sequence[GroupedNode], num_tokens: int, served: np.ndarray) -> None:
        has_state = np.zeros(len(served), np.bool_)
        # the last token of a sequence is always computed, from the state before it
        maximum = min(len(served) - 1, (num_tokens - 1) // self._page_size)
        has_state[[end for node in path for end in self._data(node) if end <= maximum]] = True
        served[1:] &= has_state[1:]

    def read(self, path: Sequence[GroupedNode], end: int) -> np.ndarray:
        page = next((data[end] for data in map(self._data, reversed(path)) if end in data), None)
        if page is None:
            return _NO_PAGES
        if page in self._order:
            self._order.move_to_end(page)
        return np.array([page], np.int32)

    def lock(self, node: GroupedNode, end: int) -> bool:
        """Lock the state at a position, which is that of a locked node. -> whether there is one."""
        page = self._data(node).get(end)
        if page is None:
            return False
        if not self._locks[page]:
            del self._order[page]
            self.num_evictable, self.num_locked = self.num_evictable - 1, self.num_locked + 1
        self._locks[page] += 1
        return True

    def unlock(self, node: GroupedNode, end: int) -> None:
        page = self._data(node)[end]
        self._locks[page] -= 1
        if not self._locks[page]:
            del self._locks[page]
            self._order[page] = (node, end)
            self.num_evictable, self.num_locked = self.num_evictable + 1, self.num_locked - 1

    def clear_locks(self, nodes: Iterator[GroupedNode]) -> None:
        for node in nodes if self._locks else ():
            for end, page in self._data(node).items():
                if self._locks.pop(page, 0):
                    self._order[page] = (node, end)
        self.num_evictable, self.num_locked = self.num_evictable + self.num_locked, 0

    def adopt(self, path: Sequence[GroupedNode], offered: np.ndarray) -> list[int]:
        unused: list[int] = []
        for num_tokens, page in offered.tolist():
            end, rest = divmod(num_tokens, self._page_size)
            node = next((node for node in path if node.end - len(node.pages) < end <= node.end), None)
            if rest or node is None or end in self._data(node):
                unused.append(page)
                continue
            self._data(node)[end] = page
            self._order[page] = (node, end)
            self.num_evictable += 1
            self._demote(path, end)
        return unused

    def _demote(self, path: Sequence[GroupedNode], end: int) -> None:
        """Evict the states before position `end` first, except where sequences branch: their
        sequence goes on from the later state."""
        for node in path:
            for earlier, page in self._data(node).items():
                if earlier < end and page in self._order and not (earlier == node.end and len(node.children) > 1):
                    self._order.move_to_end(page, last=False)

    def split(self, upper: GroupedNode, lower: GroupedNode, keep: int) -> None:
        data = self._data(lower)
        upper.group_data[self.index] = above = {end: page for end, page in data.items() if end <= upper.end}
        for end, page in above.items():
            del data[end]
            if page in self._order:
                self._order[page] = (upper, end)

    def cut(self, node: GroupedNode, keep: int) -> np.ndarray:
        data, maximum = self._data(node), node.end - len(node.pages) + keep
        gone = [end for end in data if end > maximum]
        pages = [data.pop(end) for end in gone]
        for page in pages:
            del self._order[page]
        self.num_evictable -= len(pages)
        return np.array(pages, np.int32)

    def evict(self, num_pages: int) -> np.ndarray:
        pages: list[int] = []
        while len(pages) < num_pages and self._order:
            page, (node, end) = self._order.popitem(last=False)
            del self._data(node)[end]
            pages.append(page)
        self.num_evictable -= len(pages)
        return np.array(pages, np.int32)

    def list_pages(self, node: GroupedNode) -> np.ndarray:
        return np.array(list(self._data(node).values()), np.int32)

    def _data(self, node: GroupedNode) -> dict[int, int]:
        data: dict[int, int] = node.group_data[self.index]
        return data


def make_groups(pools: Sequence[PagePool], page_size: int) -> list[Group]:
    """The groups of all pools but the first, which is that of the tokens."""
    return [
        SnapshotGroup(index, pool.name, page_size) if pool.window is None else WindowGroup(index, pool.name, pool.window, page_size)
        for index, pool in enumerate(pools[1:])
    ]
