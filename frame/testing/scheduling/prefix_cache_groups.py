"""Checks of prefix caches that serve models with several cache groups, have pins, or take a policy.
Used by the suite of the kind. Must not know a plugin by name."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from frame.core.interfaces.cache import (
    EvictableNode,
    EvictionPolicy,
    PrefixCache,
    PrefixCacheContext,
    SupportsCacheGroups,
    SupportsRelock,
    check_integrity,
    evict_all,
)
from frame.core.interfaces.cache_groups import PagePool
from frame.testing.contexts import EVICTION
from frame.testing.generators import require_bounded
from frame.testing.scheduler_rig import OldestFirst

WINDOW, STATE = 0, 1  # the further groups
NUM_PAGES, NUM_STEPS, SEEDS = 4096, 150, 6
WIDTH = 2  # pages of the window
Prefix = tuple[str, bytes]


@dataclass
class Held:
    """A locked prefix: its handle, its length in pages, and what else it locks."""

    handle: Any
    prefixes: list[Prefix]
    has_window: bool = True
    has_state: bool = False


class Grouped:
    """A cache of tokens, windows and states, and what it was given: the page of each prefix of
    whole pages, by group. Asserts the contract after each call."""

    def __init__(self, maker: Any, page_size: int) -> None:
        pools = (
            PagePool("tokens", NUM_PAGES, page_size),
            PagePool("window", NUM_PAGES, page_size, window=WIDTH * page_size),
            PagePool("snapshot", NUM_PAGES, 0),
        )
        policy = OldestFirst(EVICTION) if maker.capabilities.eviction_policy else None
        self.cache: Any = maker.target(PrefixCacheContext(page_size, NUM_PAGES, policy, pools), maker.subject.options)
        assert isinstance(self.cache, SupportsCacheGroups), "the record says groups=True; derive the class from SupportsCacheGroups"
        self.size, self.next_page = page_size, 1
        self.pages: dict[Prefix, int] = {}
        self.further: tuple[dict[Prefix, int], dict[Prefix, int]] = ({}, {})
        self.held: list[Held] = []

    def name(self, tokens: np.ndarray, space: str) -> list[Prefix]:
        """The prefixes of whole pages."""
        return [(space, tokens[: end * self.size].tobytes()) for end in range(1, len(tokens) // self.size + 1)]

    def new_pages(self, count: int) -> np.ndarray:
        self.next_page += count
        return np.arange(self.next_page - count, self.next_page, dtype=np.int32)

    def insert(self, tokens: np.ndarray, space: str, windows: list[int], states: list[int]) -> None:
        """`windows`: the pages of the sequence with a window page; `states`: positions, in pages,
        with a state."""
        prefixes = self.name(tokens, space)
        pages = self.new_pages(len(prefixes))
        window = np.zeros(len(prefixes), np.int32)
        window[windows] = self.new_pages(len(windows))
        saved = np.array([(end * self.size, page) for end, page in zip(states, self.new_pages(len(states)), strict=True)], np.int32)
        inserted = self.cache.insert(tokens, pages.copy(), space, 0, (window.copy(), saved.reshape(-1, 2).copy()))
        cached = sum(prefix in self.pages for prefix in prefixes)
        assert inserted.num_cached == cached * self.size, f"num_cached is {inserted.num_cached} of {cached * self.size} cached tokens"
        self.pages |= {prefix: int(page) for prefix, page in zip(prefixes, pages, strict=True) if prefix not in self.pages}
        offered = [(WINDOW, prefixes[place], int(window[place])) for place in windows]
        offered += [(STATE, prefixes[end - 1], int(page)) for end, (_, page) in zip(states, saved, strict=True)]
        unused = sorted(map(int, inserted.unused))
        expected = sorted(page for group, prefix, page in offered if prefix in self.further[group])
        assert unused == expected, f"of {len(offered)} pages of further groups, {len(unused)} are unused, and {len(expected)} have no place"
        for group, prefix, page in offered:
            self.further[group].setdefault(prefix, page)

    def find_ends(self, prefixes: list[Prefix], width: int) -> int:
        """Pages of the longest prefix that all groups serve, with windows of `width` pages."""
        best = 0
        for end in range(1, len(prefixes) + 1):
            if prefixes[end - 1] not in self.pages:
                break
            has_window = all(prefix in self.further[WINDOW] for prefix in prefixes[max(0, end - width) : end])
            best = end if has_window and prefixes[end - 1] in self.further[STATE] else best
        return best

    def match(self, tokens: np.ndarray, space: str) -> Any:
        """A match, compared with what the cache was given. The last of `tokens` is in no cached
        sequence."""
        prefixes = self.name(tokens, space)
        match = self.cache.match(tokens, space)
        end = match.num_tokens // self.size
        min_end, max_end = (self.find_ends(prefixes, width) for width in (WIDTH, WIDTH - (self.size == 1)))
        assert min_end <= end <= max_end, f"{end} pages match, and tokens, window and state of {max_end} are cached"
        served = sum(prefix in self.pages for prefix in prefixes) * self.size
        assert match.max_length == served, f"max_length is {match.max_length}, and the pages of {served} tokens are cached"
        if end:
            self.compare(match, prefixes[:end], "match")
        return match

    def compare(self, match: Any, prefixes: list[Prefix], what: str) -> None:
        assert match.pages.tolist() == [self.pages[prefix] for prefix in prefixes], f"{what} returns the pages of other tokens"
        window, state = (each.tolist() for each in match.groups)
        expected = [self.further[WINDOW].get(prefix, 0) for prefix in prefixes]
        assert len(window) == len(prefixes), f"{what} returns {len(window)} window pages of {len(prefixes)} pages"
        assert window[-1] == expected[-1], f"{what} lacks the page of the window that ends the prefix"
        assert all(page in (0, own) for page, own in zip(window, expected, strict=True)), f"{what} returns the window pages of other tokens"
        assert not any(window[:-WIDTH]), f"{what} returns pages before the window; 0 stands there"
        assert state == [self.further[STATE][prefixes[-1]]], f"{what} returns the state after other tokens, or none"

    def lock(self, match: Any, tokens: np.ndarray, space: str, has_state: bool) -> None:
        prefixes = self.name(tokens, space)[: match.num_tokens // self.size]
        self.cache.lock(match.handle)
        self.held.append(Held(match.handle, prefixes, has_state=has_state and self.cache.lock_state(match.handle)))
        self.compare(self.cache.read(match.handle), prefixes, "read of a locked prefix")

    def list_locked(self, group: int, width: int = 0) -> set[int]:
        """Pages of a further group that must stay. `width`: pages of a window; 0: those that the
        next token reads."""
        pages = self.further[group]
        if group == STATE:
            return {pages[held.prefixes[-1]] for held in self.held if held.has_state}
        width = width or WIDTH - (self.size == 1)
        return {pages[prefix] for held in self.held if held.has_window for prefix in held.prefixes[-width:] if prefix in pages}

    def forget(self, freed: np.ndarray, what: str) -> None:
        gone = set(map(int, freed))
        assert len(gone) == len(freed), f"{what} returns a page twice"
        locked = {self.pages[prefix] for held in self.held for prefix in held.prefixes} | self.list_locked(WINDOW) | self.list_locked(STATE)
        assert not gone & locked, f"{what} returns a page that is locked"
        for pages in (self.pages, *self.further):
            for prefix in [prefix for prefix, page in pages.items() if page in gone]:
                gone.discard(pages.pop(prefix))
        assert not gone, f"{what} returns pages that the cache does not own"

    def evict_group(self, group: int, count: int) -> None:
        evictable = self.cache.count_evictable(group)
        freed = self.cache.evict_group(group, count)
        assert len(freed) == min(count, evictable), f"evict_group({group}, {count}) returns {len(freed)} of {evictable} evictable pages"
        before = len(self.pages)
        self.forget(freed, "evict_group")
        assert len(self.pages) == before, "evict_group returns pages of the sequences, which stay"

    def check(self) -> None:
        """The cache owns what it was given and has not returned."""
        check_integrity(self.cache)
        owned = sorted(int(page) for pages in self.cache.audit() for page in pages)
        stored = sorted(page for pages in (self.pages, *self.further) for page in pages.values())
        assert owned == stored, f"audit yields {len(owned)} pages, and the cache has {len(stored)} of all groups"
        locked = {prefix for held in self.held for prefix in held.prefixes}
        assert self.cache.num_locked == len(locked), f"num_locked is {self.cache.num_locked}, {len(locked)} pages are locked"
        for group, pages in enumerate(self.further):
            counts = self.cache.count_evictable(group), self.cache.count_locked(group)
            assert sum(counts) == len(pages), f"of {len(pages)} pages of group {group}, {counts[0]} are evictable and {counts[1]} locked"
            bounds = len(self.list_locked(group)), len(self.list_locked(group, WIDTH))
            assert bounds[0] <= counts[1] <= bounds[1], f"{counts[1]} pages of group {group} are locked, those of matches are {bounds[1]}"


def check_groups_are_matched_together(maker: Any) -> None:
    """A match ends where a state was saved and the window before it is there."""
    for size in maker.page_sizes[:2]:
        on = Grouped(maker, size)
        tokens = np.repeat(np.arange(20, dtype=np.int32), size)
        ends = np.append(tokens, np.int32(99))
        on.insert(tokens[: 10 * size], "", [*range(10)], [4, 10])
        for count, expected in ((20, 10), (10, 10), (9, 4), (4, 4), (3, 0)):
            match = on.match(np.append(tokens[: count * size], np.int32(99)), "")
            assert match.num_tokens == expected * size, f"of {count} pages, {match.num_tokens // size} match, and {expected} have a state"
        on.insert(tokens, "", [18, 19], [20])
        assert on.match(ends, "").num_tokens == 20 * size, "a window at the end of the prefix is enough"
        on.insert(tokens[: 15 * size], "", [], [15])  # without its window
        on.match(np.append(tokens[: 15 * size], np.int32(99)), "")
        on.check()
        on.lock(on.match(ends, ""), tokens, "", has_state=True)
        on.check()
        for group in (WINDOW, STATE):
            on.evict_group(group, 100)
        on.check()
        on.forget(on.cache.evict(100), "evict")
        on.check()
        held = on.held.pop()
        on.cache.unlock(held.handle)
        on.check()
        on.forget(evict_all(on.cache, num_groups=2), "evict")
        on.check()
        assert not on.pages and not any(on.further), "an empty cache keeps pages"


def check_groups_in_random_calls(maker: Any) -> None:
    """Insertions, locks, evictions of all groups and repairs, compared with dictionaries."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        on = Grouped(maker, maker.page_sizes[seed % len(maker.page_sizes)])
        for _ in range(NUM_STEPS):
            _step(on, rng)
            on.check()
        for held in on.held:
            on.cache.unlock(held.handle)
        on.held.clear()
        on.forget(evict_all(on.cache, num_groups=2), "evict")
        on.check()
        assert not on.pages and not any(on.further), "pages are left when nothing is locked and all was evicted"


def _step(on: Grouped, rng: random.Random) -> None:
    count, space = rng.randint(1, 9), rng.choice(("", "a:", "a:salt"))
    numbers = [rng.randrange(2) if rng.random() < 0.3 else 0 for _ in range(count)]
    tokens = np.repeat(np.array(numbers, np.int32), on.size)
    choice = rng.random()
    if choice < 0.03:  # shorter than a page, so that nothing can be kept
        states = on.new_pages(1)
        saved = np.array([[on.size - 1, states[0]]], np.int32)
        inserted = on.cache.insert(tokens[: on.size - 1], on.new_pages(1), space, 0, (np.empty(0, np.int32), saved))
        assert [*map(int, inserted.unused)] == states.tolist(), f"of less than a page, the unused pages are {inserted.unused}"
    elif choice < 0.4:
        windows = sorted(rng.sample(range(count), rng.randint(0, count)) if rng.random() < 0.3 else range(max(0, count - 4), count))
        on.insert(tokens, space, windows, sorted(rng.sample(range(1, count + 1), rng.randint(0, min(3, count)))))
    elif choice < 0.6:
        ends = np.append(tokens, np.int32(7))
        match = on.match(ends, space)
        if match.num_tokens and len(on.held) < 4:
            on.lock(match, ends, space, has_state=rng.random() < 0.5)
    elif choice < 0.7 and on.held:
        held = on.held.pop(rng.randrange(len(on.held)))
        on.cache.unlock(held.handle)
    elif choice < 0.8 and on.held:
        held = rng.choice(on.held)
        group = rng.choice((WINDOW, STATE)) if held.has_state else WINDOW
        on.cache.unlock_group(held.handle, group)
        held.has_window, held.has_state = held.has_window and group != WINDOW, held.has_state and group != STATE
    elif choice < 0.85:
        evictable, num_pages = on.cache.num_evictable, rng.randint(0, 6)
        freed = on.cache.evict(num_pages)
        assert len(freed) >= min(num_pages, evictable), f"evict({num_pages}) returns {len(freed)} pages of {evictable} evictable ones"
        on.forget(freed, "evict")
    elif choice < 0.95:
        on.evict_group(rng.choice((WINDOW, STATE)), rng.randint(0, 3))
    elif all(held.has_window for held in on.held):
        repairs: Any = on.cache if isinstance(on.cache, SupportsRelock) else None
        if repairs is not None:
            for held in on.held[:1]:
                repairs.lock(held.handle)  # never released
            repairs.relock([held.handle for held in on.held])


# pins ---------------------------------------------------------------------------------------------


def check_pins_are_evicted_last(maker: Any) -> None:
    """Those that are pinned go after all others, the oldest pin first, and pins end with their
    pages."""
    size = maker.page_sizes[0]
    cache: Any = maker.make(size)

    def make_tokens(number: int, count: int = 3) -> np.ndarray:
        return np.repeat(100 * number + np.arange(count, dtype=np.int32), size)

    pages = [np.arange(1 + 10 * number, 4 + 10 * number, dtype=np.int32) for number in range(5)]
    for number in range(5):
        cache.insert(make_tokens(number), pages[number].copy())
    pins = {}
    for number in (3, 0, 1):
        pins[number] = cache.match(make_tokens(number)).handle
        cache.pin(pins[number])
        assert cache.is_pinned(pins[number]), "a sequence that was pinned just now is not pinned"
    assert cache.num_evictable == 15, f"num_evictable is {cache.num_evictable} of 15 pages; those that are pinned count"
    _require_evicted(cache, 6, {*pages[2], *pages[4]}, "pinned sequences are evicted before others")
    assert all(map(cache.is_pinned, pins.values())), "a pin ends though its pages are there"
    _require_evicted(cache, 3, {*pages[3]}, "the sequence of the oldest pin is not the first of those that are pinned")
    assert [cache.is_pinned(pins[number]) for number in (3, 0, 1)] == [False, True, True], "pins end with other pages than their own"
    cache.unpin(pins[3])
    cache.unpin(pins[3])
    cache.unpin(pins[0])
    assert not cache.is_pinned(pins[0]), "a pin that was ended is there"
    cache.insert(make_tokens(7), np.arange(71, 74, dtype=np.int32))
    cache.pin(cache.match(make_tokens(7)).handle)
    _require_evicted(cache, 3, {*pages[0]}, "a sequence is spared though its pin was ended")
    _require_evicted(cache, 3, {*pages[1]}, "the sequence of a newer pin is evicted before that of an older one")
    check_integrity(cache)
    _require_evicted(cache, 3, {71, 72, 73}, "pinned pages cannot be evicted")


def check_pins_of_a_prefix(maker: Any) -> None:
    """The part that is pinned outlives the rest; two pins of it end one by one; locks and repairs
    change no pin."""
    size = maker.page_sizes[0]
    cache: Any = maker.make(size)
    tokens = np.repeat(np.arange(8, dtype=np.int32), size)
    cache.insert(tokens, np.arange(1, 9, dtype=np.int32))
    handles = [cache.match(tokens[: 3 * size]).handle for _ in range(2)]
    for handle in handles:
        cache.pin(handle)
    _require_evicted(cache, 5, {4, 5, 6, 7, 8}, "the part of a sequence that is pinned is evicted before the rest")
    cache.unpin(handles[0])
    assert [cache.is_pinned(handle) for handle in handles] == [False, True], "ending one of two pins ends the other"
    locked = cache.match(tokens[: 3 * size]).handle
    cache.lock(locked)
    assert not len(cache.evict(3)), "a pinned sequence is evicted while it is locked"
    if isinstance(cache, SupportsRelock):
        cache.relock([locked])
    cache.unlock(locked)
    cache.insert(np.repeat(np.arange(50, 52, dtype=np.int32), size), np.array([21, 22], np.int32))
    assert cache.is_pinned(handles[1]), "a pin ends with a lock"
    check_integrity(cache)
    _require_evicted(cache, 2, {21, 22}, "a pin does not count after its sequence was locked")
    _require_evicted(cache, 3, {1, 2, 3}, "pinned pages cannot be evicted")
    check_integrity(cache)


def check_pins_are_forgotten(maker: Any) -> None:
    """Of tenants whose pinned sequences were evicted, nothing is kept."""
    size = maker.page_sizes[0]
    cache: Any = maker.make(size)

    def work(number: int) -> None:
        tokens, space = np.repeat(np.array([number], np.int32), size), f"tenant-{number}:"
        cache.insert(tokens, np.array([1 + number % 2000], np.int32), space)
        cache.pin(cache.match(tokens, space).handle)
        cache.evict(1)

    require_bounded(cache, work, 3000, "pinned sequences that are evicted")


def check_policies_with_ties(maker: Any) -> None:
    """A policy may give all leaves one key."""

    class Indifferent(EvictionPolicy):
        def key(self, node: EvictableNode) -> tuple[float, ...]:
            return (0.0,)

    size = maker.page_sizes[0]
    cache: Any = maker.make(size, Indifferent(EVICTION))
    sequences = [(np.repeat(np.array([number, number], np.int32), size), f"tenant{number % 3}:") for number in range(40)]
    for number, (tokens, space) in enumerate(sequences):
        cache.insert(tokens, np.array([1 + 2 * number, 2 + 2 * number], np.int32), space)
    for tokens, space in sequences[:10]:
        handle = cache.match(tokens, space).handle
        cache.lock(handle)
        cache.unlock(handle)
    freed = [int(page) for _ in range(20) for page in cache.evict(4)]
    assert sorted(freed) == [*range(1, 81)], "evict returns other pages than it has, where all leaves have the same key"


def _require_evicted(cache: PrefixCache, count: int, expected: set[int], sentence: str) -> None:
    freed = {*cache.evict(count).tolist()}
    assert freed == expected, f"{sentence}: evict({count}) returns {sorted(freed)} and not {sorted(map(int, expected))}"
