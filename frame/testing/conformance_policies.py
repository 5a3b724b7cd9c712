"""What every scheduling and eviction policy must do, as named checks. Run by the conformance option
of the pytest plugin.

Each check is (name, function without arguments) and raises AssertionError with a sentence; policies
are classes, or what else makes one without arguments.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from frame.core.interfaces.cache import EvictionPolicy, Match
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.kv_cache.radix_cache import RadixCache
from frame.core.scheduling import policy_guard as guarded_policy
from frame.core.scheduling.request import Request
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.testing.scheduler_rig import SchedulerRig

VIEW = SchedulerView(now=8.0, num_running=3, token_budget=512, free_pages=7, evictable_pages=5, page_size=4)
VOCAB = 97


class Check(NamedTuple):
    """One law of an interface."""

    name: str
    run: Callable[[], None]


def check_scheduling_policy(policy: Callable[[], SchedulingPolicy]) -> Iterator[Check]:
    """The laws of `scheduling_policy/1`, then whole runs that must yield what an unconstrained run
    yields."""
    yield Check("order_is_a_permutation", partial(_order_is_a_permutation, policy))
    yield Check("order_changes_nothing", partial(_order_changes_nothing, policy))
    yield Check("order_of_nothing", partial(_order_of_nothing, policy))
    yield Check("victim_is_never_the_oldest", partial(_victim_is_never_the_oldest, policy))
    yield Check("preemption_has_no_cycle", partial(_preemption_has_no_cycle, policy))
    for overlap in (False, True):
        for page_size in (1, 4):
            name = f"runs_{'overlapped' if overlap else 'plain'}_with_pages_of_{page_size}"
            yield Check(name, partial(_runs, policy, page_size, overlap))


def check_eviction_policy(policy: Callable[[], EvictionPolicy]) -> Iterator[Check]:
    """The laws of `eviction_policy/1`, then a cache that lives on it."""
    yield Check("key_is_an_ordered_tuple", partial(_key_is_an_ordered_tuple, policy))
    yield Check("key_depends_on_the_node_alone", partial(_key_depends_on_the_node_alone, policy))
    yield Check("cache_keeps_its_laws", partial(_cache_keeps_its_laws, policy))


def example_requests(count: int, seed: int = 0) -> list[Request]:
    """Requests with mixed lengths, priorities, outputs and matches, oldest first."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        prompt = np.array([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], np.int32)
        params = SamplingParams(max_tokens=rng.randint(1, 60))
        request = Request(
            f"request-{index}", prompt, params, seed=index, index=index, arrival=index / 10, deadline=600.0, max_num_tokens=100
        )
        request.priority = rng.randint(-2, 2)
        request.output.extend(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 5))))
        pages = np.arange(rng.randint(0, len(prompt) // 4), dtype=np.int32) + 1 + 20 * rng.randint(0, 2)
        request.match = rng.choice((None, Match(4 * len(pages), pages, None)))
        found.append(request)
    return found


# scheduling ---------------------------------------------------------------------------------------


def _order_is_a_permutation(policy: Callable[[], SchedulingPolicy]) -> None:
    waiting = example_requests(50)
    ordered = list(policy().order(waiting, VIEW))
    _require(len(ordered) == len(waiting), f"order returned {len(ordered)} of {len(waiting)} requests")
    _require({id(r) for r in ordered} == {id(r) for r in waiting}, "order returned other requests than it was given")


def _order_changes_nothing(policy: Callable[[], SchedulingPolicy]) -> None:
    waiting = example_requests(50)
    before = [(id(r), r.state, r.slot, r.priority, r.num_tokens, r.arrival) for r in waiting]
    list(policy().order(waiting, VIEW))
    _require(before == [(id(r), r.state, r.slot, r.priority, r.num_tokens, r.arrival) for r in waiting], "order changed what it was given")


def _order_of_nothing(policy: Callable[[], SchedulingPolicy]) -> None:
    _require(not list(policy().order([], VIEW)), "order of no requests is not empty")


def _victim_is_never_the_oldest(policy: Callable[[], SchedulingPolicy]) -> None:
    for seed in range(20):
        running = example_requests(8, seed)
        for count in range(1, 9):
            victim = policy().select_victim(running[:count], VIEW)
            _require(victim is not running[0], "select_victim named the oldest running request, so progress is not guaranteed")
            _require(victim is None or any(victim is r for r in running[:count]), "select_victim named a request that is not running")
            _require(count == 1 or victim is not None, f"select_victim named nobody out of {count} when pages ran out")


def _preemption_has_no_cycle(policy: Callable[[], SchedulingPolicy]) -> None:
    requests = example_requests(30)
    for one in requests:
        for other in requests:
            both = policy().can_preempt(one, other) and policy().can_preempt(other, one)
            _require(not both, "two requests preempt each other, so neither would ever finish")


def _runs(policy: Callable[[], SchedulingPolicy], page_size: int, overlap: bool) -> None:
    rng = random.Random(page_size + overlap)
    config = SchedulerConfig(
        page_size=page_size,
        num_pages=1 + 64 // page_size,
        max_running=5,
        token_budget=12,
        max_context=60,
        vocab_size=VOCAB,
        eos_ids=(3,),
        overlap=overlap,
    )
    with _complaints() as found:
        _run(SchedulerRig(config, policy()), rng)
    _require(not found, found[0] if found else "")


class _Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What is said inside of a policy at fault, with which requests are served all the same."""
    listener = _Listener()
    guarded_policy.log.addHandler(listener)
    try:
        yield listener.sentences
    finally:
        guarded_policy.log.removeHandler(listener)


def _run(rig: SchedulerRig, rng: random.Random) -> None:
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 24))] for _ in range(4)]
    for i in range(40):
        params = SamplingParams(max_tokens=rng.randint(1, 24), temperature=rng.choice((0.0, 1.0)), seed=i)
        rig.add(rng.choice(stems) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 8))] + [i], params, priority=rng.randint(0, 2))
        if rng.random() < 0.3:
            rig.step()
    rig.run()


# eviction -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class ExampleNode:
    """A leaf as an eviction policy sees it."""

    last_access: int = 0
    created: int = 0
    hits: int = 0
    priority: int = 0


def _key_is_an_ordered_tuple(policy: Callable[[], EvictionPolicy]) -> None:
    rng = random.Random(0)
    keys = [policy().key(ExampleNode(*(rng.randint(0, 9) for _ in range(4)))) for _ in range(50)]
    _require(all(isinstance(key, tuple) and key for key in keys), "key must return a tuple that is not empty")
    _require(len({len(key) for key in keys}) == 1, "key must return tuples of one length, or they cannot be compared")
    _require(all(value == value for key in keys for value in key), "key holds a value that is not a number")
    sorted(keys)


def _key_depends_on_the_node_alone(policy: Callable[[], EvictionPolicy]) -> None:
    node, other = ExampleNode(5, 3, 2, 1), ExampleNode(9, 9, 9, 9)
    one = policy()
    first = one.key(node)
    one.key(other)
    _require(one.key(node) == first == policy().key(node), "key of an unchanged node changed: a heap cannot hold it")
    _require(node == ExampleNode(5, 3, 2, 1), "key changed the node")


def _cache_keeps_its_laws(policy: Callable[[], EvictionPolicy]) -> None:
    rng = random.Random(0)
    cache, next_page, locked = RadixCache(2, policy()), 1, []
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
        wanted = min(rng.randint(0, 4), cache.num_evictable)
        _require(len(cache.evict(wanted)) == wanted, "evict freed another number of pages than it was asked for")
        cache.check_integrity()
    for handle in locked:
        cache.unlock(handle)
    cache.reset()
    _require(cache.num_evictable == 0 and not sum(map(len, cache.audit())), "reset left pages in the cache")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)
