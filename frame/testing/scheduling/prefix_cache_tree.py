"""Checks of the shape that prefixes take in a prefix cache: long chains of them, and sequences from
which others branch off. Used by the suite of the kind. Must not know a plugin by name."""

from __future__ import annotations

import inspect
import sys
import traceback
from typing import Any

import numpy as np

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy, SupportsOutline, SupportsPins, SupportsRelock, check_integrity
from frame.testing.conformance import SkipCheck
from frame.testing.contexts import EVICTION

TURNS, FRAMES = 320, 200  # prefixes of a chain, and the calls that may be open within a method


def check_long_chains_need_no_stack(maker: Any) -> None:
    """A session of many turns, each of which adds a page to the prefix of the one before. Python's
    stack has little room left, as it would have after some thousand turns."""
    size, limit = maker.page_sizes[0], sys.getrecursionlimit()
    cache: Any = maker.make(size)
    tokens, pages = np.arange(TURNS * size, dtype=np.int32), np.arange(1, TURNS + 1, dtype=np.int32)
    sys.setrecursionlimit(len(inspect.stack(0)) + FRAMES)
    try:
        for turn in range(1, TURNS + 1):
            cache.insert(tokens[: turn * size], pages[:turn])
        handle = cache.match(tokens).handle
        cache.lock(handle)
        check_integrity(cache)
        if isinstance(cache, SupportsRelock):
            cache.relock([handle])
        if isinstance(cache, SupportsOutline):
            cache.outline(2 * TURNS)
        cache.unlock(handle)
        freed = cache.evict(TURNS)
    except RecursionError as error:
        name = traceback.extract_tb(error.__traceback__)[1].name
        raise AssertionError(f"{name} of a prefix of {TURNS} turns of a session ends with a RecursionError: walk in a loop") from None
    finally:
        sys.setrecursionlimit(limit)
    assert sorted(freed.tolist()) == pages.tolist(), f"evict returns {len(freed)} of the {TURNS} pages of a session of {TURNS} turns"


def check_branches_lose_nothing(maker: Any) -> None:
    """A sequence from which another one branches off keeps what the policy reads of its first part
    (the highest priority of its requests, and its hits), and its pins."""
    size = maker.page_sizes[0]
    long, branch, late = (np.repeat(np.array(numbers, np.int32), size) for numbers in (range(8), [0, 1, 2, 3, 9], [50]))
    for field in ("priority", "hits") if maker.capabilities.eviction_policy else ():
        cache: Any = maker.make(size, Keyed(field))
        cache.insert(long, np.arange(1, 9, dtype=np.int32), priority=5)
        for _ in range(3):
            _use(cache, long)
        cache.insert(branch, np.array([1, 2, 3, 4, 20], np.int32), priority=1)
        while cache.num_evictable > 4:
            cache.evict(1)
        cache.insert(late, np.array([30], np.int32), priority=3)
        _use(cache, late)
        if cache.num_evictable == 5:  # else it evicts more at a time
            freed = cache.evict(1).tolist()
            assert freed == [30], f"a sequence loses its {field} where another one branches off: it is evicted first, copy it to both parts"
    if issubclass(maker.target, SupportsPins):
        cache = maker.make(size)
        cache.insert(long, np.arange(1, 9, dtype=np.int32))
        handles = [cache.match(long[: count * size]).handle for count in (8, 6)]
        for handle in handles:
            cache.pin(handle)
        cache.insert(branch, np.array([1, 2, 3, 4, 20], np.int32))
        are_kept = all(map(cache.is_pinned, handles)) and cache.evict(1).tolist() == [20]
        assert are_kept, "a pin ends where another sequence branches off: it lasts until a page of its sequence is evicted"
        check_integrity(cache)


def check_a_match_is_no_hit(maker: Any) -> None:
    """A waiting request is matched in many steps, and locks its prefix once."""
    if not maker.capabilities.eviction_policy:
        raise SkipCheck("it evicts in an order of its own")
    size = maker.page_sizes[0]
    cache: Any = maker.make(size, Keyed("hits"))
    prompts = [np.full(size, number, np.int32) for number in (7, 8)]
    for page, prompt in enumerate(prompts, 1):
        cache.insert(prompt, np.array([page], np.int32))
        _use(cache, prompt)
    for _ in range(5):
        cache.match(prompts[0])
    for prompt in prompts:
        _use(cache, prompt)
    freed = cache.evict(1).tolist()
    assert freed[:1] == [1], "a match counts as a hit: of two prefixes that were locked equally often, the later one is evicted"


class Keyed(EvictionPolicy):
    """Orders leaves by one field."""

    def __init__(self, field: str) -> None:
        super().__init__(EVICTION)
        self._field = field

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (getattr(node, self._field), node.created)


def _use(cache: Any, tokens: np.ndarray) -> None:
    handle = cache.match(tokens).handle
    cache.lock(handle)
    cache.unlock(handle)
