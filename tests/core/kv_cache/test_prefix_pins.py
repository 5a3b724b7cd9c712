"""Pins of sessions: their pages are evicted last, each tenant has a quota, and nothing is left."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from frame.core.interfaces.cache import PrefixCacheContext, check_integrity
from frame.core.kv_cache.prefix_pins import MAX_CHECKED, PrefixPins
from frame.core.messages import SessionPin
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.scheduler_rig import OldestFirst, SchedulerRig
from tests.core.scheduling.small_rig import config, params, policy

SIZE = 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Pinned:
    """A cache, its pins and the pages that were not handed out."""

    def __init__(self, max_pages: int = 8) -> None:
        self.cache = RadixCache(PrefixCacheContext(SIZE, 1000, OldestFirst()))
        self.clock = Clock()
        self.pins = PrefixPins(self.cache, SIZE, max_pages, self.clock)
        self._pages = itertools.count(1)
        self.num_held = 0

    def insert(self, tokens: list[int], namespace: str = "") -> None:
        keys = np.array(tokens, np.int32)
        pages = np.fromiter(itertools.islice(self._pages, len(tokens) // SIZE), np.int32)
        inserted = self.cache.insert(keys, pages, namespace)
        self.num_held += len(pages) - inserted.num_cached // SIZE

    def pin(
        self, tokens: list[int], session: str, tenant: str = "", seconds: float = 10.0, namespace: str = "", *, is_named: bool = True
    ) -> None:
        self.pins.add_pin(SessionPin(tenant, session, seconds, is_named), np.array(tokens, np.int32), namespace)

    def evict(self, count: int) -> None:
        self.num_held -= len(self.cache.evict(count))

    def has(self, tokens: list[int], namespace: str = "") -> bool:
        return self.cache.match(np.array(tokens, np.int32), namespace).num_tokens == len(tokens)


def prefix(number: int, length: int = 4) -> list[int]:
    return [100 * number + place for place in range(length)]


def test_pinned_prefixes_are_evicted_last_and_the_oldest_pin_first() -> None:
    used = Pinned()
    for number in range(1, 5):
        used.insert(prefix(number))
    used.pin(prefix(1), "first")
    used.pin(prefix(2), "second")
    used.evict(4)
    assert [used.has(prefix(number)) for number in range(1, 5)] == [True, True, False, False]
    used.evict(2)
    assert [used.has(prefix(number)) for number in (1, 2)] == [False, True]
    used.evict(1)
    assert not used.has(prefix(2))
    check_integrity(used.cache)


def test_another_tenants_pins_outlast_prefixes_without() -> None:
    """Also where their tenant has most pages."""
    used = Pinned()
    used.insert(prefix(1, 12), "a:")
    used.insert(prefix(2), "b:")
    used.pin(prefix(1, 12), "session", "a", namespace="a:")
    used.evict(2)
    assert used.has(prefix(1, 12), "a:")
    assert not used.has(prefix(2), "b:")


def test_a_pin_ends_with_its_time_its_name_or_a_newer_one() -> None:
    used = Pinned()
    for number in range(1, 4):
        used.insert(prefix(number))
    used.pin(prefix(1), "short", seconds=1.0)
    used.pin(prefix(2), "long", seconds=5.0)
    used.pin(prefix(2), "long", seconds=9.0)
    used.clock.now = 5.0
    used.pins.end_due()
    assert used.pins.describe_load() == {"pins": 1, "pinned_pages": 2}
    assert not used.pins.end_pin("other", "long")
    assert used.pins.end_pin("", "long")
    assert not used.pins.end_pin("", "long")
    assert used.pins.describe_load() == {"pins": 0, "pinned_pages": 0}
    check_integrity(used.cache)


def test_a_tenant_has_a_quota() -> None:
    used = Pinned(max_pages=5)
    for number in range(1, 5):
        used.insert(prefix(number), "a:")
    used.insert(prefix(9), "b:")
    used.pin(prefix(9), "kept", "b", namespace="b:")
    for number in range(1, 5):
        used.pin(prefix(number), f"session {number}", "a", namespace="a:")
    assert used.pins.describe_load() == {"pins": 3, "pinned_pages": 6}
    used.evict(4)
    assert [used.has(prefix(number), "a:") for number in range(1, 5)] == [False, False, True, True]
    assert used.has(prefix(9), "b:")


def test_a_conversation_without_a_name_counts_once() -> None:
    """Its pins end with the next turn's. Not those that last longer, or of another branch."""
    used = Pinned(max_pages=20)
    used.insert([*prefix(1, 10), 5, 5])
    used.insert([*prefix(1, 10), 7, 7])
    for number, length in enumerate((4, 6, 6, 10)):
        used.pin(prefix(1, length), f"{number}", is_named=False)
        assert used.pins.describe_load() == {"pins": 1, "pinned_pages": length // SIZE}
    used.pin([*prefix(1, 10), 5, 5], "branch", is_named=False, seconds=60.0)
    used.pin([*prefix(1, 10), 7, 7], "named", seconds=1.0)
    assert used.pins.describe_load() == {"pins": 2, "pinned_pages": 12}
    used.pin([*prefix(1, 10), 5, 5], "short", is_named=False, seconds=1.0)
    assert used.pins.describe_load()["pins"] == 3
    used.clock.now = 1.0
    used.pins.end_due()
    assert used.pins.describe_load() == {"pins": 1, "pinned_pages": 6}
    used.pins.end_all()
    assert not used.pins._unnamed
    check_integrity(used.cache)


def test_a_pin_at_the_quota_looks_at_few_others() -> None:
    used = Pinned(max_pages=5000)
    checked = []
    used.cache.is_pinned = lambda handle: checked.append(handle) or True  # type: ignore[method-assign, func-returns-value]
    for number in range(2600):
        used.insert(prefix(number))
        used.pin(prefix(number), f"{number}", is_named=False)
    assert used.pins.describe_load()["pins"] == 2500
    assert 100 <= len(checked) <= 100 * MAX_CHECKED


def test_of_a_prefix_beyond_the_quota_the_beginning_is_pinned() -> None:
    used = Pinned(max_pages=3)
    used.insert(prefix(1, 20))
    used.insert(prefix(2))
    used.pin(prefix(1, 20), "session")
    assert used.pins.describe_load() == {"pins": 1, "pinned_pages": 3}
    used.evict(9)
    assert used.has(prefix(1, 6))
    assert not used.has(prefix(2))
    check_integrity(used.cache)


def test_renewed_pins_leave_no_entries() -> None:
    used = Pinned()
    used.insert(prefix(1))
    for _ in range(1000):
        used.pin(prefix(1), "session", seconds=1e6)
    assert len(used.pins._ends) < 100
    assert used.pins.describe_load() == {"pins": 1, "pinned_pages": 2}


def test_a_flush_ends_all_pins() -> None:
    rig = SchedulerRig(config(max_pinned_pages=8), policy())
    rig.add(list(range(20)), params(), pin=SessionPin("", "session", 60.0))
    while not rig.scheduler.is_idle:
        rig.step()
    assert rig.scheduler.get_load()["pins"] == 1
    rig.run()  # flushes, and checks that all pages are back
    assert rig.scheduler.get_load()["pins"] == 0


@pytest.mark.parametrize("max_pages", [0, 32])
def test_pins_hold_up_no_request(max_pages: int) -> None:
    """Most pages are pinned, and a request needs nearly all of them."""
    rig = SchedulerRig(config(num_pages=33, max_pinned_pages=max_pages), policy())
    for number in range(4):
        rig.add([number, *range(20)], params(), pin=SessionPin("", f"{number}", 60.0))
        while not rig.scheduler.is_idle:
            rig.step()
    load = rig.scheduler.get_load()
    assert (load["pins"], load["pinned_pages"]) == ((4, 28) if max_pages else (0, 0))
    rig.add([7] * 90, params())
    rig.run()


class PinMachine(RuleBasedStateMachine):
    """Random inserts, locks, evictions and pins of three tenants."""

    @initialize(max_pages=st.integers(1, 12))
    def start(self, max_pages: int) -> None:
        self.used = Pinned(max_pages)
        self.max_pages = max_pages
        self.locked: list[object] = []

    @rule(number=st.integers(0, 3), length=st.integers(1, 14), tail=st.integers(0, 2), tenant=st.sampled_from("ab"))
    def insert(self, number: int, length: int, tail: int, tenant: str) -> None:
        self.used.insert([*prefix(number, length), *[7000 + tail] * tail], f"{tenant}:")

    @rule(
        number=st.integers(0, 3),
        length=st.integers(1, 14),
        tenant=st.sampled_from("ab"),
        session=st.sampled_from("xyz"),
        seconds=st.sampled_from([1.0, 3.0, 100.0]),
        is_named=st.booleans(),
    )
    def pin(self, number: int, length: int, tenant: str, session: str, seconds: float, is_named: bool) -> None:
        self.used.pin(prefix(number, length), session, tenant, seconds, f"{tenant}:", is_named=is_named)

    @rule(tenant=st.sampled_from("abc"), session=st.sampled_from("xyz"))
    def end(self, tenant: str, session: str) -> None:
        self.used.pins.end_pin(tenant, session)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.used.clock.now += seconds
        self.used.pins.end_due()

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        evictable = self.used.cache.num_evictable
        before = self.used.num_held
        self.used.evict(count)
        assert before - self.used.num_held >= min(count, evictable)

    @rule(number=st.integers(0, 3), length=st.integers(2, 14), tenant=st.sampled_from("ab"))
    def lock(self, number: int, length: int, tenant: str) -> None:
        match = self.used.cache.match(np.array(prefix(number, length), np.int32), f"{tenant}:")
        if match.handle is not None:
            self.used.cache.lock(match.handle)
            self.locked.append(match.handle)

    @rule()
    def unlock(self) -> None:
        if self.locked:
            self.used.cache.unlock(self.locked.pop())

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "used"):
            return
        check_integrity(self.used.cache)
        assert all(pages <= self.max_pages for pages in self.used.pins._num_pages.values())
        assert self.used.cache.num_evictable + self.used.cache.num_locked == self.used.num_held

    def teardown(self) -> None:
        """0 pins, pages and entries more than at the start."""
        if not hasattr(self, "used"):
            return
        while self.locked:
            self.used.cache.unlock(self.locked.pop())
        self.used.clock.now += 1000.0
        self.used.pins.end_due()
        assert self.used.pins.describe_load() == {"pins": 0, "pinned_pages": 0}
        assert not self.used.pins._pins
        assert not self.used.pins._num_pages
        assert not self.used.pins._ends
        assert self.used.cache._num_pins == 0
        self.used.evict(self.used.cache.num_evictable)
        assert self.used.num_held == 0
        check_integrity(self.used.cache)


PinMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPins = PinMachine.TestCase
