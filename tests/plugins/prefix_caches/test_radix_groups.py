"""The radix cache with a window group and states, compared with dictionaries of prefixes: random
insertions, matches, locks and evictions of single groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from frame.core.interfaces.cache import PrefixCacheContext, check_integrity
from frame.core.interfaces.cache_groups import PagePool
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.scheduler_rig import OldestFirst

TOKENS = st.lists(st.integers(0, 1), max_size=12)
Prefix = tuple[int, ...]


class GroupsMachine(RuleBasedStateMachine):
    """`tokens`, `window` and `states` map each prefix of whole pages to its last page, or
    to the state after it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[Prefix, int] = {}
        self.window: dict[Prefix, int] = {}
        self.states: dict[Prefix, int] = {}
        self.locked: list[tuple[list[Prefix], list[Prefix], Any]] = []  # prefixes, those in the window, handle
        self.next_page = 1

    @initialize(size=st.sampled_from([1, 2]), window=st.integers(1, 5))
    def start(self, size: int, window: int) -> None:
        self.size, self.width = size, -(-window // size)
        pools = (PagePool("tokens", 999, size), PagePool("window", 999, size, window), PagePool("snapshot", 999, 0))
        self.cache = RadixCache(PrefixCacheContext(size, 999, OldestFirst(), pools))

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def new_page(self) -> int:
        self.next_page += 1
        return self.next_page

    def max_length(self, tokens: list[int]) -> tuple[list[Prefix], int]:
        """The cached prefixes of `tokens`, and how many of them all groups serve."""
        found = [prefix for prefix in self.prefixes(tokens) if prefix in self.tokens]
        for end in range(len(found), 0, -1):
            has_window = all(prefix in self.window for prefix in found[max(0, end - self.width) : end])
            if has_window and found[end - 1] in self.states and end * self.size < len(tokens):
                return found, end
        return found, 0

    @rule(tokens=TOKENS, lock=st.booleans())
    def match(self, tokens: list[int], lock: bool) -> None:
        found, end = self.max_length(tokens)
        match = self.cache.match(np.array(tokens, np.int32))
        assert match.num_tokens == end * self.size
        assert match.pages.tolist() == [self.tokens[prefix] for prefix in found[:end]]
        if not end:
            return
        assert match.max_length == min(len(found), (len(tokens) - 1) // self.size) * self.size
        first = max(0, end - self.width)
        window = [0] * first + [self.window[prefix] for prefix in found[first:end]]
        assert [pages.tolist() for pages in match.groups] == [window, [self.states[found[end - 1]]]]
        if lock:
            self.cache.lock(match.handle)
            self.locked.append((found[:end], found[first:end], match.handle))
            assert self.cache.read(match.handle).groups[0].tolist() == window

    @rule(tokens=TOKENS, tail=st.integers(0, 6), at=st.integers(0, 12))
    def insert(self, tokens: list[int], tail: int, at: int) -> None:
        prefixes = self.prefixes(tokens)
        pages = [self.new_page() for _ in prefixes]
        window = [self.new_page() if i >= len(prefixes) - tail else 0 for i in range(len(prefixes))]
        state = self.new_page()
        given = [np.array(window, np.int32), np.array([[at, state]], np.int32)]
        inserted = self.cache.insert(np.array(tokens, np.int32), np.array(pages, np.int32), groups=given)
        unused = [page for prefix, page in zip(prefixes, window, strict=True) if page and prefix in self.window]
        place = tuple(tokens[:at])
        if at > len(tokens) or at % self.size or place not in prefixes or place in self.states:
            unused.append(state)
        else:
            self.states[place] = state
        assert sorted(inserted.unused) == sorted(unused)
        assert inserted.num_cached == sum(prefix in self.tokens for prefix in prefixes) * self.size
        for prefix, page, own in zip(prefixes, pages, window, strict=True):
            self.tokens.setdefault(prefix, page)
            if own:
                self.window.setdefault(prefix, own)

    @precondition(lambda self: self.locked)
    @rule(index=st.integers(0, 99), whole=st.booleans())
    def unlock(self, index: int, whole: bool) -> None:
        index %= len(self.locked)
        prefixes, _, handle = self.locked[index]
        if whole:
            self.cache.unlock(handle)
            del self.locked[index]
        else:
            self.cache.unlock_group(handle, 0)
            self.locked[index] = prefixes, [], handle

    @rule(count=st.integers(0, 5), index=st.sampled_from([0, 1]))
    def evict_group(self, count: int, index: int) -> None:
        held = (self.window, self.states)[index]
        available = self.cache.count_evictable(index)
        freed = self.cache.evict_group(index, count).tolist()
        assert len(freed) == min(count, available)
        locked = self.locked_window() if index == 0 else set()
        self.forget(held, freed, locked)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        freed = self.cache.evict(count).tolist()
        locked = {prefix for prefixes, _, _ in self.locked for prefix in prefixes}
        gone = [page for page in freed if page in self.tokens.values()]
        others = [page for page in freed if page not in gone]
        before = set(self.tokens)
        self.forget(self.tokens, gone, locked)
        lost = before - set(self.tokens)
        for held in (self.window, self.states):
            mine = [held[prefix] for prefix in lost if prefix in held]
            self.forget(held, mine, set())
            others = [page for page in others if page not in mine]
        assert not others
        assert all(prefix[: -self.size] in self.tokens for prefix in self.tokens if len(prefix) > self.size)

    @staticmethod
    def forget(held: dict[Prefix, int], pages: list[int], locked: set[Prefix]) -> None:
        owner = {page: prefix for prefix, page in held.items()}
        for page in pages:
            assert owner[page] not in locked, "a locked page was evicted"
            del held[owner[page]]

    def locked_window(self) -> set[Prefix]:
        return {prefix for _, window, _ in self.locked for prefix in window}

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_integrity(self.cache)
        locked = self.locked_window() & set(self.window)
        assert (self.cache.count_locked(0), self.cache.count_evictable(0)) == (len(locked), len(self.window) - len(locked))
        assert self.cache.count_evictable(1) == len(self.states)
        owned = Counter(page for part in self.cache.audit() for page in part.tolist())
        assert owned == Counter([*self.tokens.values(), *self.window.values(), *self.states.values()])


@pytest.mark.parametrize("examples", [30, pytest.param(1000, marks=pytest.mark.soak)])
def test_it_agrees_with_dictionaries(examples: int) -> None:
    suppressed = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        GroupsMachine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=suppressed)
    )


def test_locks_are_repaired() -> None:
    machine = GroupsMachine()
    machine.start(1, 2)
    machine.insert([0, 1, 1, 0], 4, 3)
    machine.match([0, 1, 1, 0, 1], True)
    ((_, _, handle),) = machine.locked
    machine.cache.lock(handle)
    machine.cache.relock([handle])
    machine.accounts_are_right()
    assert (machine.cache.num_locked, machine.cache.count_locked(0)) == (3, 2)
    machine.cache.relock([])
    assert machine.cache.count_locked(0) == 0
