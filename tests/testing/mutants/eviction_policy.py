"""Eviction policies with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy as np

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy
from tests.testing.mutants import MutantList

Key = tuple[float, ...]


class LeastUsed(EvictionPolicy):
    """Least frequently used; on a tie the least recently used."""

    def __init__(self, *_: Any) -> None:
        super().__init__(*_)
        self.calls = 0
        self.kept: dict[int, Key] = {}

    def key(self, node: EvictableNode) -> Key:
        return (node.hits, node.last_access)


mutant = MUTANTS = MutantList("eviction_policy", reference=LeastUsed)


@mutant
class CountsCalls(LeastUsed):
    """Breaks ties by a counter of calls, so that a key changes each time it is read."""

    def key(self, node: EvictableNode) -> Key:
        self.calls += 1
        return (node.hits, self.calls)


@mutant
class BreaksTiesAtRandom(LeastUsed):
    """Breaks ties at random, each time anew."""

    def key(self, node: EvictableNode) -> Key:
        return (node.hits, random.random())


@mutant
class ReadsAClock(LeastUsed):
    """Uses the age by a clock, so that keys of different times do not compare."""

    def key(self, node: EvictableNode) -> Key:
        return (int(time.monotonic()) // 3600 - node.last_access, node.hits)


@mutant
class RemembersKeys(LeastUsed):
    """Keeps the key of a node, which is stale once the node is used again."""

    def key(self, node: EvictableNode) -> Key:
        return self.kept.setdefault(id(node), super().key(node))


@mutant
class CountsItself(LeastUsed):
    """Counts uses on the node itself, on top of the cache's count."""

    def key(self, node: EvictableNode) -> Key:
        node.hits += 1
        return super().key(node)


@mutant
class DecaysHits(LeastUsed):
    """Halves the hits of a node to let it age."""

    def key(self, node: EvictableNode) -> Key:
        node.hits //= 2
        return super().key(node)


@mutant
class ReturnsANumber(LeastUsed):
    """Returns a number instead of a tuple."""

    def key(self, node: EvictableNode) -> Any:
        return node.last_access


@mutant
class ReturnsAList(LeastUsed):
    """Returns a list instead of a tuple."""

    def key(self, node: EvictableNode) -> Any:
        return [node.hits, node.last_access]


@mutant
class ReturnsNothing(LeastUsed):
    """Returns an empty tuple for nodes without a hit."""

    def key(self, node: EvictableNode) -> Key:
        return (node.hits, node.last_access)[: 2 * bool(node.hits)]


@mutant
class VariesInLength(LeastUsed):
    """Leaves the second part of the key out for some nodes."""

    def key(self, node: EvictableNode) -> Key:
        return (node.hits,) if node.hits % 2 else (node.hits, node.last_access)


@mutant
class HasNoScore(LeastUsed):
    """Returns None as the score of new nodes, which does not compare with numbers."""

    def key(self, node: EvictableNode) -> Any:
        return (node.hits or None, node.last_access)


@mutant
class ReturnsAnArray(LeastUsed):
    """Returns arrays of one element, whose equality is an array."""

    def key(self, node: EvictableNode) -> Any:
        return (np.array([node.hits]), np.array([node.last_access]))


@mutant
class DividesByAge(LeastUsed):
    """Divides by the time between creation and last access, which is 0 for a new node."""

    def key(self, node: EvictableNode) -> Key:
        return (node.hits / (node.last_access - node.created),)


@mutant
class IsNotANumber(LeastUsed):
    """Computes 0 / 0 for a new node, which numpy makes NaN."""

    def key(self, node: EvictableNode) -> Key:
        with np.errstate(all="ignore"):
            return (float(np.float64(node.hits) / np.float64(node.last_access - node.created)), node.last_access)


@mutant
class TakesTheLogarithm(LeastUsed):
    """Takes the logarithm of a priority, which may be 0 or negative."""

    def key(self, node: EvictableNode) -> Key:
        return (math.log(node.priority), node.last_access)


@mutant
class RoundsTheClock(LeastUsed):
    """Holds the clock in 32-bit floating point, which has no odd numbers from 2**24 on."""

    def key(self, node: EvictableNode) -> Key:
        return (float(np.float32(node.last_access)),)


@mutant
class WrapsTheClock(LeastUsed):
    """Keeps 5 digits of the clock, which starts again after 100,000 accesses."""

    def key(self, node: EvictableNode) -> Key:
        return (node.last_access % 100_000,)


@mutant
class ReadsTheTree(LeastUsed):
    """Reads the children of a node, which are no part of the interface."""

    def key(self, node: EvictableNode) -> Key:
        return (len(node.children), node.last_access)  # type: ignore[attr-defined]


@mutant
class ComparesIdentities(LeastUsed):
    """Breaks ties by the address of the node, so that runs cannot be repeated."""

    def key(self, node: EvictableNode) -> Key:
        return (node.hits, id(node))


@mutant
class IsSlow(LeastUsed):
    """Computes a weight by summing a long series for each key."""

    def key(self, node: EvictableNode) -> Key:
        return (node.hits * sum(1 / i for i in range(1, 20_000)), node.last_access)
