"""The conformance suite of eviction policies: keys of single nodes, then caches and scheduler runs
that evict by them. Must not know a policy by name."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from unittest import mock

import numpy as np

from frame.core.interfaces.cache import EvictionPolicy, PrefixCacheContext, check_integrity, evict_all
from frame.testing.conformance import Check, Subject, collect
from frame.testing.contexts import EVICTION
from frame.testing.generators import require_bounded
from frame.testing.scheduler_rig import InOrder, SchedulerRig, add_requests, load_cache_class, make_tight_config

MAX_SECONDS = 1e-4  # of one key; a cache computes thousands in one eviction
LATE = 1 << 40  # accesses of a cache that has run for years
# Accesses before the example nodes, so that their clocks pass a limit of some number format.
OFFSETS = (LATE, *(power - 40 for power in (10**4, 10**5, 10**6, 1 << 16, 1 << 24, 1 << 31, 1 << 32)))
LARGE = (99, 100, 101, 255, 256, 710, 1024, 65_536, 1 << 31)
CLOCKS = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns")

Make = Callable[[], EvictionPolicy]


@dataclass(slots=True)
class ExampleNode:
    """A leaf as an eviction policy sees it."""

    last_access: int = 0
    created: int = 0
    hits: int = 0
    priority: int = 0


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `eviction_policy`: keys, then a cache and a scheduler that use them."""
    policy = partial(subject.target, EVICTION, subject.options)
    yield from collect(__name__, policy)


def example_nodes(count: int = 50) -> list[ExampleNode]:
    """Nodes as they occur (created before the last access), new ones and ones of negative priority
    among them."""
    rng = random.Random(0)
    nodes = [ExampleNode(a, b, c, d) for a, b, c, d in product((0, 1), (0,), (0, 1), (-1, 0, 1))]
    while len(nodes) < count:
        created = rng.randint(0, 40)
        nodes.append(ExampleNode(created + rng.randint(0, 40), created, rng.randint(0, 9), rng.randint(-3, 9)))
    return nodes


def check_key_is_an_ordered_tuple(policy: Make) -> None:
    keys = [policy().key(node) for node in example_nodes()]
    assert all(isinstance(key, tuple) and key for key in keys), "key must return a tuple that is not empty"
    assert len({len(key) for key in keys}) == 1, "key must return tuples of one length, or they cannot be compared"
    assert all(isinstance(value, int | float | np.number | np.bool_) for key in keys for value in key), "key must hold numbers alone"
    assert all(bool(value == value) for key in keys for value in key), "key holds a value that is not a number"


def check_key_depends_on_the_node_alone(policy: Make) -> None:
    """The key of a node is the same after keys of other nodes, in another object, and for an equal
    node; it changes no node."""
    one, nodes = policy(), example_nodes()
    first = [one.key(node) for node in nodes]
    assert [one.key(node) for node in nodes] == first, "key of an unchanged node changed: a heap cannot hold it"
    assert [policy().key(replace(node)) for node in reversed(nodes)] == first[::-1], "equal nodes have different keys"
    assert nodes == example_nodes(), "key changed the node"


def check_key_follows_the_node(policy: Make) -> None:
    """A node that was matched has the key of a node with its new fields."""
    one, node = policy(), ExampleNode(5, 3, 2, 1)
    one.key(node)
    for change in ({"last_access": 9}, {"hits": 3}, {"priority": 4}, {"last_access": 12, "hits": 8}):
        for name, value in change.items():
            setattr(node, name, value)
        assert one.key(node) == policy().key(replace(node)), f"key of a node is stale after its {' and '.join(change)} changed"


def check_key_is_the_same_at_any_time(policy: Make) -> None:
    """No key depends on a clock: a heap holds keys of different times."""
    node, one = ExampleNode(5, 3, 2, 1), policy()
    first = one.key(node)
    with ExitStack() as stack:
        for name in CLOCKS:
            stack.enter_context(mock.patch.object(time, name, lambda: LATE))
        later = one.key(node)
    assert later == first, "key depends on the time of the call"


def check_key_order_holds_for_a_late_clock(policy: Make) -> None:
    """Nodes have the same order however many accesses the cache has had before."""
    one, nodes = policy(), example_nodes()
    early = [one.key(node) for node in nodes]
    for offset in OFFSETS:
        late = [one.key(replace(node, last_access=node.last_access + offset, created=node.created + offset)) for node in nodes]
        for i, j in product(range(len(nodes)), repeat=2):
            is_same = (early[i] < early[j]) == (late[i] < late[j])
            assert is_same, f"{nodes[i]} and {nodes[j]} change their order after {offset} accesses: the key rounds or wraps"


def check_key_takes_large_fields(policy: Make) -> None:
    """Fields of a cache that has run for years: nodes that were hit a thousand and a billion times,
    and a clock above 2**53."""
    one = policy()
    fields = ((hits, priority, clock) for hits in LARGE for priority in (-LARGE[-1], 0, LARGE[-1]) for clock in (LARGE[-1], 1 << 54))
    keys = [one.key(ExampleNode(clock, clock // 2, hits, priority)) for hits, priority, clock in fields]
    assert all(bool(value == value) for key in keys for value in key), "key holds a value that is not a number, for a node with many hits"
    assert len({len(key) for key in keys}) == 1, "key must return tuples of one length, or they cannot be compared"


def check_keys_are_not_kept(policy: Make) -> None:
    one = policy()
    require_bounded(one, lambda number: one.key(ExampleNode(number + 1, number, number % 7, number % 3)), 20_000, "keys of as many nodes")


def check_key_is_fast(policy: Make) -> None:
    one, nodes, best = policy(), example_nodes(), 1.0
    for _ in range(4):
        began = time.perf_counter()
        for node in nodes:
            one.key(node)
        best = min(best, (time.perf_counter() - began) / len(nodes))
        if best < MAX_SECONDS:
            return
    raise AssertionError(f"key takes {best * 1e6:.0f} µs, and an eviction computes thousands")


def check_cache_keeps_its_contract(policy: Make) -> None:
    rng = random.Random(0)
    cache, next_page, locked = load_cache_class(reuses=True)(PrefixCacheContext(2, 4096, policy())), 1, []
    for _ in range(300):
        tokens = np.array([rng.randrange(3) for _ in range(rng.randint(2, 14))], np.int32)
        pages = np.arange(next_page, next_page + len(tokens) // 2, dtype=np.int32)
        next_page += len(pages)
        handle = cache.insert(tokens, pages, priority=rng.randint(0, 3)).handle
        if rng.random() < 0.3:
            cache.lock(handle)
            locked.append(handle)
        if locked and rng.random() < 0.3:
            cache.unlock(locked.pop(rng.randrange(len(locked))))
        count = min(rng.randint(0, 4), cache.num_evictable)
        assert len(cache.evict(count)) == count, "evict freed another number of pages than it was asked for"
        check_integrity(cache)
    for handle in locked:
        cache.unlock(handle)
    evict_all(cache)
    assert cache.num_evictable == 0 and not sum(map(len, cache.audit())), "evict left unlocked pages in the cache"


def check_runs_with_few_pages(policy: Make) -> None:
    """Requests whose prefixes do not all fit yield what an unconstrained run yields."""
    add_requests(SchedulerRig(make_tight_config(2, 33, max_running=4), InOrder(), policy()), seed=0)
