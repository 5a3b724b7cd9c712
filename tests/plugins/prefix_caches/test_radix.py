"""The in-tree prefix caches: the conformance suite, and what the radix cache does besides."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy, PrefixCacheContext, check_integrity, evict_all
from frame.plugins.loader import load_registry
from frame.plugins.prefix_caches import radix as radix_cache
from frame.plugins.prefix_caches import radix_nodes
from frame.plugins.prefix_caches.none import NoCache
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.conformance import Setting, Subject
from frame.testing.contexts import EVICTION
from frame.testing.scheduling.prefix_cache import suite
from frame.testing.scheduling.prefix_cache_machine import run_machine

REGISTRY = load_registry(installed=False)
POLICIES = {record.name: REGISTRY.load(record) for record in REGISTRY.records("eviction_policy")}


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_with_every_eviction_policy_it_agrees_with_a_dictionary() -> None:
    names = sorted(POLICIES)

    def make(page_size: int, number: int) -> RadixCache:
        return RadixCache(PrefixCacheContext(page_size, 4096, POLICIES[names[number % len(names)]](EVICTION)))

    run_machine(make, (1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["radix", "none"])
def test_suite(name: str) -> None:
    record = REGISTRY.get("prefix_cache", name)
    for check in suite(Subject(record, REGISTRY.load(record), None, Setting())):
        if check.name != "agrees_with_a_dictionary":  # above, with every policy
            check.run()


def test_an_outline_of_a_large_tree_examines_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    latest = radix_nodes._latest

    def counted(nodes: list[Any], limit: int, parent: int) -> Any:
        looked_at.extend(nodes)
        return latest(nodes, limit, parent)

    monkeypatch.setattr(radix_nodes, "_latest", counted)
    monkeypatch.setattr(radix_nodes, "_LOOKED_AT", 64)
    cache = RadixCache(PrefixCacheContext(1, 4096, POLICIES["lru"](EVICTION)))
    for page in range(0, 800, 2):
        token = page // 2 % 200
        cache.insert(ids([token, token]), ids([page, page + 1]), "" if page < 400 else "tenant")
    cache.insert(ids([0, 0, 5]), ids([0, 1, 5000]))  # old, and used
    runs = cache.outline(4)
    assert len(looked_at) <= 64
    assert [(run.first_ids, run.namespace) for run in runs] == [
        ([0, 0], ""), ([5], ""), ([199, 199], "tenant"), ([198, 198], "tenant"),
    ]  # fmt: skip


BREACHES: dict[str, tuple[Callable[[radix_nodes.Node], None], str]] = {
    "child": (lambda node: node.key.__setitem__(0, 70_000), "not its parent's child"),
    "end": (lambda node: setattr(node, "end", node.end + 1), "ends elsewhere"),
    "tokens": (lambda node: setattr(node, "key", np.append(node.key, np.int32(1))), "do not fill"),
    "locks": (lambda node: setattr(node, "refs", 1), "locked more often|are evictable, counted"),
    "heap": (lambda node: setattr(node, "version", node.version + 1), "is in no eviction heap"),
    "page": (lambda node: node.pages.__setitem__(0, 3), "owned twice"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_an_audit_checks_every_node_in_bounded_parts(breach: str) -> None:
    harm, sentence = BREACHES[breach]
    cache = RadixCache(PrefixCacheContext(1, 4096, POLICIES["lru"](EVICTION)))
    for page in range(0, 3_000, 3):
        cache.insert(ids([page // 30, page, page]), ids([page + 1, page + 2, page + 3]))
    parts = list(cache.audit())
    assert sum(map(len, parts)) == cache.num_evictable
    assert max(map(len, parts)) <= 2 * radix_cache._AUDITED  # pages, of nodes that hold two at most
    leaves = [node for node in cache._nodes() if not node.children]
    for place in (0, len(leaves) // 2, len(leaves) - 1):
        broken = deepcopy(cache)
        harm([node for node in broken._nodes() if not node.children][place])
        with pytest.raises(RuntimeError, match=sentence):
            check_integrity(broken)


def filled(policy: EvictionPolicy, uses: dict[int, int]) -> RadixCache:
    """One prefix for each page; prefix t is page t + 1 and is matched `uses[t]` more times, in
    order of t."""
    cache = RadixCache(PrefixCacheContext(1, 4096, policy))
    for token in uses:
        cache.insert(ids([token]), ids([token + 1]), priority=token % 2)
    for token, count in uses.items():
        for _ in range(count):
            handle = cache.match(ids([token])).handle
            cache.lock(handle)
            cache.unlock(handle)
    return cache


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [0, 2, 1, 3]),  # 0 and 2 were not used after their insertion
        ("mru", [3, 1, 2, 0]),
        ("fifo", [0, 1, 2, 3]),
        ("lfu", [0, 2, 3, 1]),
        ("slru", [0, 2, 3, 1]),
        ("priority", [0, 2, 1, 3]),
    ],
)
def test_eviction_order(name: str, order: list[int]) -> None:
    cache = filled(POLICIES[name](EVICTION), {0: 0, 1: 3, 2: 0, 3: 1})
    assert [int(cache.evict(1)[0]) - 1 for _ in range(4)] == order


def test_a_long_prefix_is_evicted_from_its_end() -> None:
    cache = RadixCache(PrefixCacheContext(2, 4096, POLICIES["lru"](EVICTION)))
    cache.insert(ids(list(range(20))), np.arange(1, 11, dtype=np.int32))
    assert cache.evict(3).tolist() == [8, 9, 10]
    assert cache.match(ids(list(range(20)))).num_tokens == 14
    check_integrity(cache)


def test_a_match_that_was_evicted_before_it_was_locked_is_an_error() -> None:
    cache = RadixCache(PrefixCacheContext(1, 4096, POLICIES["lru"](EVICTION)))
    cache.insert(ids([1, 2, 3]), ids([1, 2, 3]))
    whole, part = cache.match(ids([1, 2, 3])), cache.match(ids([1, 2]))
    cache.evict(1)
    with pytest.raises(RuntimeError, match="evicted before it was locked"):
        cache.lock(whole.handle)
    cache.lock(part.handle)
    assert cache.num_locked == 2
    with pytest.raises(RuntimeError, match="not locked"):
        cache.unlock(whole.handle)


def test_a_match_survives_a_split() -> None:
    cache = RadixCache(PrefixCacheContext(1, 4096, POLICIES["lru"](EVICTION)))
    cache.insert(ids([1, 2, 3, 4]), ids([1, 2, 3, 4]))
    part = cache.match(ids([1]))
    whole = cache.match(ids([1, 2, 3, 4]))
    cache.insert(ids([1, 2, 9]), ids([5, 6, 7]))
    cache.lock(part.handle)
    cache.lock(whole.handle)
    assert (cache.num_locked, cache.num_evictable) == (4, 1)
    cache.unlock(whole.handle)
    assert cache.num_locked == 1
    check_integrity(cache)


def test_the_heap_is_bounded() -> None:
    cache = RadixCache(PrefixCacheContext(1, 4096, POLICIES["lru"](EVICTION)))
    for token in range(10):
        cache.insert(ids([token]), ids([token + 1]))
    for _ in range(2_000):
        handle = cache.match(ids([3])).handle
        cache.lock(handle)
        cache.unlock(handle)
    assert cache._num_entries() <= 2 * 10 + 64


def test_a_split_node_owns_its_memory() -> None:
    cache = RadixCache(PrefixCacheContext(1, 4096, POLICIES["lru"](EVICTION)))
    cache.insert(np.arange(10_000, dtype=np.int32), np.arange(1, 10_001, dtype=np.int32))
    cache.insert(ids([0, 1, 50_000]), ids([20_001, 20_002, 20_003]))
    cache.evict(9_998)
    assert all(node.key.base is None and node.pages.base is None for node in cache._nodes())


def test_the_policy_key_is_a_node() -> None:
    class Recorder(EvictionPolicy):
        def key(self, node: EvictableNode) -> tuple[float, ...]:
            seen.append((node.last_access, node.created, node.hits, node.priority))
            return (0,)

    seen: list[tuple[int, int, int, int]] = []
    cache = RadixCache(PrefixCacheContext(1, 4096, Recorder(EVICTION)))
    cache.insert(ids([1]), ids([1]), priority=4)
    cache.insert(ids([1, 2]), ids([9, 2]), priority=2)
    assert seen == [(1, 1, 0, 4), (2, 2, 0, 2)]


def test_bad_insert() -> None:
    with pytest.raises(ValueError, match="4 tokens fill 2 pages, but 1 were given"):
        RadixCache(PrefixCacheContext(2, 4096, POLICIES["lru"](EVICTION))).insert(ids([1, 2, 3, 4]), ids([1]))


def test_no_cache_matches_and_stores_nothing() -> None:
    cache = NoCache(PrefixCacheContext(2, 4096))
    inserted = cache.insert(ids([1, 2, 3, 4, 5]), ids([1, 2, 3]))
    assert inserted.num_cached == 4
    cache.lock(inserted.handle)
    cache.unlock(inserted.handle)
    assert cache.match(ids([1, 2, 3, 4])).num_tokens == 0
    assert cache.num_evictable == cache.num_locked == len(cache.evict(3)) == len(evict_all(cache)) == 0
    check_integrity(cache)


def test_an_owner_evicts_its_own_pages_first() -> None:
    cache, pages = RadixCache(PrefixCacheContext(2, 4096, POLICIES["lru"](EVICTION))), iter(range(1, 10_000))

    def insert(namespace: str, start: int, count: int) -> None:
        cache.insert(ids([start + i % 50 for i in range(2 * count)]), ids([next(pages) for _ in range(count)]), namespace)

    def left(namespace: str, start: int, count: int) -> int:
        return cache.match(ids([start + i % 50 for i in range(2 * count)]), namespace).num_tokens // 2

    insert("modest:", 0, 20)  # the oldest of all
    for i in range(10):
        insert(f"greedy:{i}", 100, 20)  # each salt is a namespace of its own, of one owner
    freed = cache.evict(170)
    assert len(set(freed.tolist())) == 170
    assert left("modest:", 0, 20) == 20
    assert sum(left(f"greedy:{i}", 100, 20) for i in range(10)) == 30
    cache.evict(30)  # now both have the same number: each loses pages
    check_integrity(cache)
    assert 5 <= left("modest:", 0, 20) <= 15
    assert cache.num_evictable == 20
    cache.evict(100)
    assert cache.num_evictable == 0
    assert cache._evictable_of == {}
