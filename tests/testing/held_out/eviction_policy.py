"""Eviction policies: priority, then recency; and policies with a bug each."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.cache import EvictableNode, EvictionContext, EvictionPolicy
from tests.testing.held_out import Wrong


class PriorityThenRecency(EvictionPolicy):
    """Leaves of low priority go first, of equal ones that with the oldest use."""

    def __init__(self, context: EvictionContext, options: BaseModel | None = None) -> None:
        self.num_pages = context.num_pages

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.priority, node.last_access)


TWIN = PriorityThenRecency
WRONG = Wrong()


@WRONG.add("Leaves are evicted in a wrong order: the key holds the age at the time of the call, so that keys of a heap do not compare.")
class AgeNow(PriorityThenRecency):
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.priority, node.last_access / time.monotonic())


@WRONG.add("Eviction falls back to another order, with an error in the log, for each prefix that is used when it is created.")
class RateOfHits(PriorityThenRecency):
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (float(np.float64(node.hits) / np.float64(node.last_access - node.created)), node.last_access)


@WRONG.add("New prefixes are evicted in the order of old ones: keys are remembered by the address of the node, which is used again.")
class RemembersByAddress(PriorityThenRecency):
    def __init__(self, context: EvictionContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._keys: dict[tuple[int, int], tuple[float, ...]] = {}

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return self._keys.setdefault((id(node), node.hits), super().key(node))


@WRONG.add("After 16 million accesses recently used prefixes are evicted before older ones: the clock is rounded to float32.")
class SinglePrecision(PriorityThenRecency):
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.priority, float(np.float32(node.last_access)))


@WRONG.add("The order of leaves that are already in the heap changes when a request of higher priority comes: keys are relative to it.")
class RelativePriority(PriorityThenRecency):
    def __init__(self, context: EvictionContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._highest = 1

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        self._highest = max(self._highest, node.priority)
        return (node.priority / self._highest + node.last_access,)


@WRONG.add("Requests of priority 100 and above are not protected, but put the whole cache to another order: there is no key for them.")
class NoKeyForPinned(PriorityThenRecency):
    def key(self, node: EvictableNode) -> Any:
        return None if node.priority >= 100 else super().key(node)


@WRONG.add("Prefixes lose their hits while the cache sorts them, so that display and other policies are wrong: a key writes to its node.")
class DecaysHits(PriorityThenRecency):
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        key = (node.priority, node.hits, node.last_access)
        node.hits //= 2
        return key


@WRONG.add("Inserting gets slower with the uptime of the server: each key is ranked among all that were ever asked for.")
class RanksAmongAll(PriorityThenRecency):
    def __init__(self, context: EvictionContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._seen: list[int] = []

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        self._seen.append(node.hits)
        is_cold = node.hits <= sum(self._seen) / len(self._seen)
        return (node.priority, not is_cold, node.last_access)
