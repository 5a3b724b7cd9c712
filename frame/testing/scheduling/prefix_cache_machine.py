"""Random calls of a prefix cache, compared with a dictionary of prefixes (a stateful test of
hypothesis).

Used by the suite `prefix_cache` and by the tests of caches. Must not know a plugin by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from frame.core.interfaces.cache import PrefixCache, SupportsOutline, SupportsRelock, check_integrity, evict_all

TOKENS = st.lists(st.integers(0, 2), max_size=14)
NAMESPACES = st.sampled_from(["", "salt", "one:", "one:salt", "two:"])
Prefix = tuple[str, tuple[int, ...]]


class CacheMachine(RuleBasedStateMachine):
    """`model` maps every cached prefix of whole pages to its last page; `locks` counts how often
    each is locked."""

    def __init__(self, make: Callable[[int, int], PrefixCache], page_sizes: Sequence[int]) -> None:
        super().__init__()
        self._make, self._page_sizes = make, tuple(page_sizes)
        self.model: dict[Prefix, int] = {}
        self.locks: Counter[Prefix] = Counter()
        self.locked: list[tuple[list[Prefix], Any]] = []
        self.next_page = 1

    @initialize(number=st.integers(0, 29))
    def start(self, number: int) -> None:
        self.page_size = self._page_sizes[number % len(self._page_sizes)]
        self.cache = self._make(self.page_size, number)

    def prefixes(self, tokens: Sequence[int], namespace: str) -> list[Prefix]:
        return [(namespace, tuple(tokens[:end])) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def cached(self, prefixes: list[Prefix]) -> list[Prefix]:
        known = []
        for prefix in prefixes:
            if prefix not in self.model:
                break
            known.append(prefix)
        return known

    @rule(tokens=TOKENS, namespace=NAMESPACES, lock=st.booleans())
    def match(self, tokens: list[int], namespace: str, lock: bool) -> None:
        tokens = self._widen(tokens)
        expected = self.cached(self.prefixes(tokens, namespace))
        match = self.cache.match(np.array(tokens, np.int32), namespace)
        assert match.num_tokens == len(expected) * self.page_size, f"{match.num_tokens} tokens match, not {len(expected) * self.page_size}"
        assert match.pages.tolist() == [self.model[prefix] for prefix in expected], "a match has other pages than were inserted"
        if lock:
            self.lock(match.handle, expected)

    @rule(tokens=TOKENS, namespace=NAMESPACES, priority=st.integers(0, 2), lock=st.booleans())
    def insert(self, tokens: list[int], namespace: str, priority: int, lock: bool) -> None:
        tokens = self._widen(tokens)
        prefixes = self.prefixes(tokens, namespace)
        pages = np.arange(self.next_page, self.next_page + len(prefixes) + 1, dtype=np.int32)  # one more than whole pages
        self.next_page += len(pages)
        cached = len(self.cached(prefixes))
        inserted = self.cache.insert(np.array(tokens, np.int32), pages, namespace, priority)
        assert inserted.num_cached == cached * self.page_size, f"num_cached is {inserted.num_cached}, not {cached * self.page_size}"
        for prefix, page in list(zip(prefixes, pages.tolist(), strict=False))[cached:]:
            self.model[prefix] = page
        if lock:
            self.lock(inserted.handle, prefixes)

    def _widen(self, tokens: list[int]) -> list[int]:
        """For pages larger than the strategy's sequences: each token several times."""
        times = max(1, self.page_size // 3)
        return [token for token in tokens for _ in range(times)]

    def lock(self, handle: Any, prefixes: list[Prefix]) -> None:
        self.cache.lock(handle)
        self.locks.update(prefixes)
        self.locked.append((prefixes, handle))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        prefixes, handle = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(handle)
        self.locks.subtract(prefixes)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        evictable = self.cache.num_evictable
        self.forget(self.cache.evict(count), min(count, evictable))

    @rule()
    def reset(self) -> None:
        self.forget(evict_all(self.cache), self.cache.num_evictable)
        assert self.cache.num_evictable == 0, "evict left unlocked pages"

    def forget(self, pages: np.ndarray, min_count: int) -> None:
        freed = set(pages.tolist())
        assert len(freed) == len(pages) >= min_count, f"{len(pages)} pages were evicted, at least {min_count} could be"
        gone = [prefix for prefix, page in self.model.items() if page in freed]
        assert len(gone) == len(freed), "pages were evicted that the cache did not own"
        assert not any(self.locks[prefix] for prefix in gone), "a locked page was evicted"
        for prefix in gone:
            del self.model[prefix]
        for namespace, tokens in self.model:
            is_first = len(tokens) == self.page_size
            assert is_first or (namespace, tokens[: -self.page_size]) in self.model, "a prefix outlives a shorter one"

    @rule()
    def relock(self) -> None:
        if isinstance(self.cache, SupportsRelock):
            self.cache.relock(handle for _, handle in self.locked)

    @rule()
    def abandon_audit(self) -> None:
        next(iter(self.cache.audit()), None)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_integrity(self.cache)
        locked = sum(1 for prefix in self.model if self.locks[prefix])
        assert self.cache.num_locked == locked, f"num_locked is {self.cache.num_locked}, {locked} pages are locked"
        assert self.cache.num_evictable == len(self.model) - locked, f"num_evictable is {self.cache.num_evictable}"
        owned = sorted(page for pages in self.cache.audit() for page in pages.tolist())
        assert owned == sorted(self.model.values()), "audit yields other pages than the cache owns"

    @invariant()
    def is_outlined(self) -> None:
        cache = getattr(self, "cache", None)
        if not isinstance(cache, SupportsOutline) or not (runs := cache.outline(1_000)):
            return
        assert sum(run.tokens for run in runs) == len(self.model) * self.page_size, "the outline shows another number of tokens"
        for run in runs:
            assert run.hidden == 0, "an outline without a limit hides runs"
            start = 0 if run.parent < 0 else runs[run.parent].start + runs[run.parent].tokens
            assert run.start == start, "a run does not begin where its parent ends"
        shown = cache.outline(2)
        assert [run.age for run in shown] == [run.age for run in runs[:2]], "a shorter outline shows other runs"
        for place, run in enumerate(shown):
            hidden = sum(other.parent == place for other in runs) - (place == 0 and len(runs) > 1 and runs[1].parent == 0)
            assert run.hidden == hidden, "the number of hidden children is wrong"


def run_machine(make: Callable[[int, int], PrefixCache], page_sizes: Sequence[int], is_thorough: bool = False) -> None:
    """Compare the cache that `make(page_size, number)` builds with the dictionary; `number` is
    drawn from 0 to 29. Raises AssertionError with the shortest calls that differ."""
    bounds = settings(
        max_examples=400 if is_thorough else 60,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: CacheMachine(make, page_sizes), settings=bounds)  # type: ignore[arg-type]
