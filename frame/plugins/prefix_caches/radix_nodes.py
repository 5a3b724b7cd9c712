"""The nodes of the radix tree and handles to them, and the outline of a tree for display.

Used by `frame.plugins.prefix_caches.radix`. Must not know requests or devices.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np

from frame.core.interfaces.cache import CachedRun, owner_of

_FIRST_IDS = 16  # tokens of a run that an outline shows
_LOOKED_AT = 4096  # most nodes that an outline examines, because requests wait for it


class Node:
    """A run of whole pages. A node without a parent is a root, or was removed from the tree.

    `end`: pages from the root to this node's end. `refs`: locks at or below this node. `version`:
    incremented when the node's entry in the eviction heap becomes invalid. `pins`: those that end
    here, with the time of the pin. `group_data`: what it holds of each further cache group.
    """

    __slots__ = (
        "children",
        "created",
        "end",
        "group_data",
        "hits",
        "key",
        "last_access",
        "namespace",
        "owner",
        "pages",
        "parent",
        "pins",
        "priority",
        "refs",
        "version",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: np.ndarray, pages: np.ndarray, namespace: str) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.namespace = namespace
        self.owner: str = parent.owner if parent else owner_of(namespace)
        self.end: int = (parent.end if parent else 0) + len(pages)
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.version = 0
        self.last_access = 0
        self.created = 0
        self.hits = 0
        self.priority = 0
        self.pins: dict[Handle, int] | None = None
        self.group_data: list[Any] = []


class Handle:
    """The end of a prefix: `end` pages from the root, at or above the end of `node`. `groups`:
    indices of the further groups that it locks."""

    __slots__ = ("end", "groups", "node")

    def __init__(self, node: Node, end: int) -> None:
        self.node = node
        self.end = end
        self.groups: list[int] = []


def outline_tree(
    all_roots: dict[str, Node], limit: int, page_size: int, clock: int, count_pages: Callable[[Node], dict[str, int]]
) -> list[CachedRun]:
    """Up to `limit` nodes below the roots, parents before children, the most recently used first.
    `count_pages`: pages of further groups that a node holds, by group."""
    picked: list[tuple[Node, int]] = []
    roots = _ends(all_roots, _LOOKED_AT // 4)
    tops = [child for root in roots for child in _ends(root.children, _LOOKED_AT // (2 * len(roots)))]
    queue, left = _latest(tops, limit, -1), _LOOKED_AT - len(tops)
    while queue and len(picked) < limit:
        *_, node, parent = heapq.heappop(queue)
        children = _ends(node.children, left // 2)
        left -= len(children)
        for entry in _latest(children, limit, len(picked)):
            heapq.heappush(queue, entry)
        picked.append((node, parent))
    shown = Counter(parent for _, parent in picked)
    return [
        CachedRun(
            parent=parent,
            start=(node.end - len(node.pages)) * page_size,
            tokens=len(node.pages) * page_size,
            locks=node.refs,
            hits=node.hits,
            age=clock - node.last_access,
            hidden=len(node.children) - shown[place],
            namespace=node.namespace,
            first_ids=node.key[:_FIRST_IDS].tolist(),
            groups=count_pages(node),
        )
        for place, (node, parent) in enumerate(picked)
    ]


def _ends(nodes: dict[Any, Node], maximum: int) -> list[Node]:
    """All nodes, or, of more than `maximum`, the oldest and the newest ones: old nodes are still
    there because they are used."""
    if len(nodes) <= maximum:
        return list(nodes.values())
    return [*islice(nodes.values(), maximum // 2), *islice(reversed(nodes.values()), maximum - maximum // 2)]


def _latest(nodes: Iterable[Node], limit: int, parent: int) -> list[tuple[int, int, Node, int]]:
    """A heap of the `limit` most recently used nodes, each with its parent's index."""
    return heapq.nsmallest(limit, ((-node.last_access, id(node), node, parent) for node in nodes))
