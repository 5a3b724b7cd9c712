"""The conformance suite of prefix caches: single rules of the contract, whole runs of the scheduler
over the cache, then random calls compared with a dictionary. Must not know a plugin by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from frame.core.interfaces.cache import (
    EvictionPolicy,
    Inserted,
    PrefixCache,
    PrefixCacheCapabilities,
    PrefixCacheContext,
    SupportsOutline,
    SupportsPins,
    SupportsRelock,
    check_integrity,
    evict_all,
)
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.contexts import EVICTION
from frame.testing.generators import ALIKE, make_alike, require_bounded, require_fast, require_growth, require_kept
from frame.testing.scheduler_rig import InOrder, OldestFirst, SchedulerRig, add_requests, make_tight_config
from frame.testing.scheduling import prefix_cache_groups, prefix_cache_tree
from frame.testing.scheduling.prefix_cache_tree import Keyed

NUM_PAGES = 4096
MAX_SECONDS = 1.5e-3  # of a match of a few pages
PAGE_SIZES = (1, 2, 3)  # those that are checked, unless the record has others


class Maker:
    """Makes caches of the plugin under test."""

    def __init__(self, subject: Subject) -> None:
        capabilities = subject.record.capabilities
        self.subject = subject
        self.target: type[PrefixCache] = subject.target
        self.capabilities = capabilities if isinstance(capabilities, PrefixCacheCapabilities) else PrefixCacheCapabilities()
        self.page_sizes = self.capabilities.page_sizes or PAGE_SIZES

    def make(self, page_size: int | None = None, policy: EvictionPolicy | None = None, num_pages: int = NUM_PAGES) -> PrefixCache:
        """A new cache, with `policy` (least recently used) if it takes one."""
        size = page_size or self.page_sizes[0]
        taken = None
        if self.capabilities.eviction_policy:
            taken = policy or OldestFirst(EVICTION)
        return self.target(PrefixCacheContext(size, num_pages, taken), self.subject.options)


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of a prefix cache. One that stores nothing, takes no eviction policy or leaves out
    an optional method has fewer."""
    maker = Maker(subject)

    def check(function: Callable[..., None], *arguments: Any, name: str = "") -> Check:
        return Check(name or function.__name__.strip("_").removeprefix("check_"), partial(function, maker, *arguments))

    yield check(_record_and_class_agree)
    if not maker.target.reuses:
        yield check(_stores_nothing)
        yield check(_serves_equal_tokens, maker.page_sizes[0], False, name="serves_equal_tokens")
        return
    yield from (*collect(__name__, maker), *collect(prefix_cache_tree.__name__, maker))
    checks: list[Callable[[Maker], None]] = []
    if maker.capabilities.eviction_policy:
        checks += [_evicts_in_the_order_of_its_policy, _passes_priorities_to_its_policy]
        checks.append(prefix_cache_groups.check_policies_with_ties)
    if issubclass(maker.target, SupportsOutline):
        checks.append(_outlines_parents_before_children)
    if issubclass(maker.target, SupportsRelock):
        checks.append(_repairs_its_locks)
    if maker.capabilities.groups:
        checks += [function for name, function in vars(prefix_cache_groups).items() if name.startswith("check_groups_")]
    if issubclass(maker.target, SupportsPins):
        checks += [function for name, function in vars(prefix_cache_groups).items() if name.startswith("check_pins_")]
    yield from map(check, checks)
    for page_size in maker.page_sizes[:2]:
        for overlap in (False, True):
            name = f"serves_equal_tokens_{'overlapped' if overlap else 'plain'}_with_pages_of_{page_size}"
            yield check(_serves_equal_tokens, page_size, overlap, name=name)
    yield check(_agrees_with_a_dictionary)


def ids(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int32)


class Sequences:
    """Inserts sequences with new pages into a cache of one page size."""

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self.cache = cache
        self.page_size = page_size
        self._next = 1

    def tokens(self, numbers: Iterable[int]) -> np.ndarray:
        """A page of equal tokens for each number."""
        return ids(number for number in numbers for _ in range(self.page_size))

    def new_pages(self, count: int) -> np.ndarray:
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int32)

    def insert(self, numbers: Iterable[int], namespace: str = "", priority: int = 0) -> tuple[np.ndarray, Inserted]:
        """Insert one page of tokens for each number. -> their pages, the cache's answer."""
        tokens = self.tokens(numbers)
        pages = self.new_pages(len(tokens) // self.page_size)
        return pages, self.cache.insert(tokens, pages.copy(), namespace, priority)

    def find(self, numbers: Iterable[int], namespace: str = "") -> list[int]:
        """The pages of the longest cached prefix."""
        match = self.cache.match(self.tokens(numbers), namespace)
        size = len(match.pages) * self.page_size
        assert match.num_tokens == size, f"num_tokens of a match is {match.num_tokens}, its pages hold {size}"
        return [int(page) for page in match.pages]

    def touch(self, numbers: Iterable[int]) -> None:
        """Use a prefix, as a request does."""
        handle = self.cache.match(self.tokens(numbers)).handle
        self.cache.lock(handle)
        self.cache.unlock(handle)


def _new(maker: Maker, policy: EvictionPolicy | None = None) -> Sequences:
    size = maker.page_sizes[0]
    return Sequences(maker.make(size, policy), size)


# every cache --------------------------------------------------------------------------------------


def _record_and_class_agree(maker: Maker) -> None:
    target, capabilities = maker.target, maker.capabilities
    assert target.reuses == capabilities.reuses, f"the record says reuses={capabilities.reuses}, the class says {target.reuses}"


def _stores_nothing(maker: Maker) -> None:
    on = _new(maker)
    pages, inserted = on.insert(range(4))
    assert inserted.num_cached == len(pages) * on.page_size, "reuses is False, but insert keeps pages; all of them are duplicates"
    on.cache.lock(inserted.handle)
    on.cache.unlock(inserted.handle)
    assert not on.find(range(4)), "reuses is False, but match finds a prefix"
    left = [on.cache.num_evictable, on.cache.num_locked, len(on.cache.evict(4)), len(evict_all(on.cache)), len(_owned(on.cache))]
    assert not any(left), "reuses is False, but the cache owns pages"


def _serves_equal_tokens(maker: Maker, page_size: int, overlap: bool) -> None:
    config = make_tight_config(page_size, 1 + max(64 // page_size, 12), overlap=overlap)
    rig = SchedulerRig(config, InOrder(), prefix_cache=maker.make(page_size))
    add_requests(rig, page_size, ("", "", "a:", "a:salt"), abort_share=0.1)
    cached = sum(request.cached or 0 for request in rig.requests.values())
    assert bool(cached) == maker.target.reuses, f"{cached} prompt tokens of 40 requests with common prefixes came from the cache"


# caches that store prefixes -----------------------------------------------------------------------


def check_finds_what_was_inserted(maker: Maker) -> None:
    on = _new(maker)
    long = list(range(1000))
    pages, inserted = on.insert(long)
    assert inserted.num_cached == 0, f"num_cached is {inserted.num_cached} for tokens that were not cached"
    assert on.find(long) == pages.tolist(), "match does not find the pages of a sequence that was inserted"
    assert on.find([*long[:400], 5, 6]) == pages[:400].tolist(), "match does not find the first pages of a longer sequence"
    more, again = on.insert([*long[:700], 3, 2, 1])
    assert again.num_cached == 700 * on.page_size, f"num_cached is {again.num_cached} of {700 * on.page_size} cached tokens"
    assert on.find([*long[:700], 3, 2, 1]) == [*pages[:700], *more[700:]], "a sequence that branches off has the wrong pages"
    assert on.find(long) == pages.tolist(), "a branch changed the pages of the first sequence"
    assert on.find([9, *long]) == [], "match finds tokens that do not begin at the first cached token"
    _check_counts(on.cache, owned=[*pages, *more[700:]], locked=0)


def check_keeps_namespaces_apart(maker: Maker) -> None:
    on = _new(maker)
    spaces = ("", "one:", "one:salt", "two:salt", "salt")
    for space in spaces:
        assert on.find(range(8), space) == [], f"namespace {space!r} finds the prefixes of another one"
        _, inserted = on.insert(range(8), space)
        assert inserted.num_cached == 0, f"insert into namespace {space!r} finds the prefixes of another one"
    pages = [page for space in spaces for page in on.find(range(8), space)]
    assert pages == list(range(1, 41)), "a namespace has the pages of another one"


def check_compares_namespaces_whole(maker: Maker) -> None:
    """Tenants, salts and versions whose names are equal in up to 4,000 characters, or that an
    encoding or a normal form of Unicode merges."""
    on = _new(maker)
    spaces = [name for pair in make_alike((*ALIKE, 300, 4000)) for name in pair]
    spaces += ["\u00e9", "\u00e8", "e\u0301", "e", "\ufb01", "fi", "\uff46\uff49", "\u00df", "ss", "\u0130", "i"]
    spaces += [f"{name}:salt" for name in spaces] + [f"one:{name}" for name in spaces] + [f"one:salt\0{number}" for number in (1, 10)]
    spaces += ["one:salt", "one:Salt", "one:salt ", "one:salt\n", " one:salt", ":salt", "salt", ":", ""]
    expected = {space: on.insert([5, 6], space)[0].tolist() for space in spaces}
    for space in spaces:
        assert on.find([5, 6], space) == expected[space], f"namespace {space!r} finds the prefixes of another one"


def check_large_pages_and_long_sequences(maker: Maker) -> None:
    """Pages above 65,536, and a sequence of more than 4,096 tokens that a match finds whole."""
    size = maker.page_sizes[0]
    on = Sequences(maker.make(size, num_pages=1 << 18), size)
    on.new_pages((1 << 16) - 100)
    long = list(range(4200))
    pages, _ = on.insert(long)
    assert on.find(long) == pages.tolist(), (
        f"match does not find the pages {pages[0]} to {pages[-1]} of a sequence of {len(long) * size} tokens"
    )
    assert sorted(_owned(on.cache)) == sorted(pages.tolist()), "audit yields other pages than were inserted, from page 65,436 on"


def check_locks_of_many_requests(maker: Maker) -> None:
    """300 requests share a system prompt: it is locked until the last one ends."""
    on = _new(maker)
    pages, inserted = on.insert(range(3))
    for _ in range(300):
        on.cache.lock(inserted.handle)
    for left in range(299, -1, -1):
        on.cache.unlock(inserted.handle)
        assert on.cache.num_locked == (len(pages) if left else 0), (
            f"a prefix that {left} of 300 requests use has {on.cache.num_locked} locked pages"
        )


def check_matches_are_kept(maker: Maker) -> None:
    on = _new(maker)
    for numbers in (range(4), range(50, 54)):
        on.insert(numbers)
    require_kept(lambda numbers: on.cache.match(on.tokens(numbers)).pages, range(4), range(50, 54), "the pages of a match")


def check_memory_after_evictions(maker: Maker) -> None:
    """What was evicted is forgotten."""
    on = _new(maker)

    def work(number: int) -> None:
        _, inserted = on.insert([number % 1000, number], f"tenant-{number}:")
        on.cache.lock(inserted.handle)
        on.cache.unlock(inserted.handle)
        on.cache.evict(2)

    require_bounded(on.cache, work, 3000, "sequences that are inserted and evicted")


def check_time_does_not_grow_with_the_cache(maker: Maker) -> None:
    """A match and an insertion take as long in a cache of 2,000 sequences as in one of 20."""

    def make(count: int) -> Callable[[], object]:
        on = Sequences(maker.make(num_pages=1 << 18), maker.page_sizes[0])
        for number in range(count):
            on.insert([number, 7])

        def work() -> None:
            for number in range(20):
                on.find([number % 20, 7])
                on.insert([-number - 1, 7])

        return work

    require_growth(make, 20, 2000, "20 matches and insertions in a cache of so many sequences", factor=6.0, minimum=0.01)
    on = _new(maker)
    on.insert(range(4))
    tokens = on.tokens(range(4))
    require_fast(lambda: on.cache.match(tokens), MAX_SECONDS, "a match of four pages")


def check_tokens_of_large_pages_all_count(maker: Maker) -> None:
    """Prompts that differ in the last token of a page of 16 to 256 tokens, and in no other."""
    for size in maker.capabilities.page_sizes or (16, 17, 64, 256):
        cache = maker.make(size)
        for page in range(2):
            tokens = np.arange(2 * size, dtype=np.int32)
            cache.insert(tokens, ids([1 + 4 * page, 2 + 4 * page]), f"space {page}:")
            for place in (size * (1 + page) - 1, size * page + size // 2, size * page):
                other = tokens.copy()
                other[place] += 100_000
                matched = cache.match(other, f"space {page}:").num_tokens
                assert matched == page * size, f"of pages of {size} tokens, {matched} tokens match prompts that differ in token {place}"


def check_evicts_thousands_of_pages(maker: Maker) -> None:
    on = _new(maker)
    for number in range(100):
        on.insert([1000 * number + page for page in range(30)])
    freed = on.cache.evict(2500)
    assert len(freed) >= 2500, f"evict(2500) returned {len(freed)} pages, though 3000 were evictable"
    check_integrity(on.cache)


def check_counting_takes_no_longer_in_a_full_cache(maker: Maker) -> None:
    """The scheduler asks for the number of evictable and locked pages several times a step."""

    def count(size: int) -> Callable[[], object]:
        on = _new(maker)
        for number in range(size):
            on.insert([2 * number, 2 * number + 1])
        return lambda: [(on.cache.num_evictable, on.cache.num_locked) for _ in range(300)]

    require_growth(count, 60, 1800, "300 times num_evictable and num_locked with so many prompts", factor=4.0, minimum=5e-3)


def check_keeps_whole_pages_only(maker: Maker) -> None:
    size = max(maker.page_sizes)
    on = Sequences(maker.make(size), size)
    tokens, pages = ids(range(4 * size - 1)), on.new_pages(5)
    whole = len(tokens) // size
    inserted = on.cache.insert(tokens, pages)
    _check_counts(on.cache, owned=pages[:whole].tolist(), locked=0)
    match = on.cache.match(np.append(tokens, np.int32(90)))
    assert match.num_tokens == whole * size, f"{match.num_tokens} tokens match, of {whole} cached pages of {size}"
    on.cache.lock(inserted.handle)
    _check_counts(on.cache, owned=pages[:whole].tolist(), locked=whole)


def check_tells_large_token_ids_apart(maker: Maker) -> None:
    """Ids of 31 bits, ids that are neighbours, and the negative keys of media and adapters."""
    on = _new(maker)
    numbers = [*(1 << shift for shift in range(31)), (1 << 24) + 1, (1 << 30) + 1]
    numbers += [-2, -3, -4, -5, -(1 << 16) - 2, -(1 << 24) - 1, -(1 << 24) - 2, -(1 << 31) + 1, -(1 << 31)]
    every = [on.insert([number, number])[0].tolist() for number in numbers]
    assert [on.find([number, number]) for number in numbers] == every, "two sequences with different token ids have the same pages"
    on.insert([1, 2])
    assert len(on.find([2, 1])) == 1, "the order of tokens does not count"


def check_keeps_no_view_of_its_arguments(maker: Maker) -> None:
    on = _new(maker)
    tokens, pages = on.tokens(range(6)), on.new_pages(6)
    expected = pages.tolist()
    on.cache.insert(tokens, pages)
    tokens[:], pages[:] = 99, 0
    assert on.find(range(6)) == expected, "insert keeps a view of its arguments, which the caller changes afterwards"
    match = on.cache.match(on.tokens(range(6)))
    match.pages.setflags(write=True)
    match.pages[:] = 0
    assert on.find(range(6)) == expected, "match returns the cache's own array, which the caller may change"
    check_integrity(on.cache)


def check_takes_its_own_pages_again(maker: Maker) -> None:
    on = _new(maker)
    first, inserted = on.insert(range(4))
    on.cache.lock(inserted.handle)
    fresh = on.new_pages(4)
    tokens = on.tokens(range(8))
    again = on.cache.insert(tokens, np.concatenate((first, fresh)))
    assert again.num_cached == 4 * on.page_size, "num_cached of a prefix that grew by the cache's own pages is wrong"
    on.cache.lock(again.handle)
    on.cache.unlock(inserted.handle)
    _check_counts(on.cache, owned=[*first, *fresh], locked=8)
    on.cache.unlock(again.handle)
    _check_counts(on.cache, owned=[*first, *fresh], locked=0)


def check_nests_locks(maker: Maker) -> None:
    on = _new(maker)
    pages, inserted = on.insert(range(6))
    short = on.cache.match(on.tokens(range(3)))
    on.cache.lock(short.handle)
    _check_counts(on.cache, pages.tolist(), locked=3)
    for handle in (inserted.handle, on.cache.match(on.tokens(range(6))).handle):
        on.cache.lock(handle)
    _check_counts(on.cache, pages.tolist(), locked=6)
    on.cache.unlock(inserted.handle)
    _check_counts(on.cache, pages.tolist(), locked=6)
    assert len(on.cache.evict(6)) == 0, "evict returns pages that are locked twice and were unlocked once"
    assert len(evict_all(on.cache)) == 0, "evict returns locked pages"
    on.cache.unlock(short.handle)
    _check_counts(on.cache, pages.tolist(), locked=6)
    nothing = on.cache.match(on.tokens([77])).handle
    on.cache.lock(nothing)
    on.cache.unlock(nothing)
    _check_counts(on.cache, pages.tolist(), locked=6)


def check_keeps_matches_valid_while_others_are_locked(maker: Maker) -> None:
    on = _new(maker)
    pages, _ = on.insert(range(8))
    handles = [on.cache.match(on.tokens(range(count))).handle for count in (2, 8, 5)]
    for handle in handles:
        on.cache.lock(handle)
    _check_counts(on.cache, pages.tolist(), locked=8)
    on.cache.unlock(handles[1])
    _check_counts(on.cache, pages.tolist(), locked=5)
    assert sorted(on.cache.evict(8)) == sorted(pages[5:]), "evict frees other pages than the unlocked ones"


def check_evicts_the_longest_first(maker: Maker) -> None:
    on = _new(maker)
    on.insert(range(10))
    on.insert([*range(5), 50, 51])
    assert len(on.cache.evict(0)) == 0, "evict(0) returns pages"
    for _ in range(6):
        freed = on.cache.evict(2)
        assert len(freed) >= min(2, 12), f"evict(2) returned {len(freed)} pages, though more were evictable"
        reachable = {*on.find(range(10)), *on.find([*range(5), 50, 51])}
        assert reachable == set(_owned(on.cache)), "evict left pages that no sequence reaches: free a prefix from its end"
        assert not reachable & set(freed.tolist()), "match finds pages that evict returned"


def _evicts_in_the_order_of_its_policy(maker: Maker) -> None:
    for field, order in (("last_access", [0, 2, 1, 3]), ("created", [0, 1, 2, 3]), ("hits", [0, 2, 3, 1])):
        on = _new(maker, Keyed(field))
        pages = [on.insert([number])[0].tolist() for number in range(4)]
        for number, uses in enumerate((0, 3, 0, 1)):
            for _ in range(uses):
                on.touch([number])
        freed = [on.cache.evict(1).tolist() for _ in range(4)]
        assert freed == [pages[number] for number in order], f"the order of eviction by {field} is not the policy's"


def _passes_priorities_to_its_policy(maker: Maker) -> None:
    on = _new(maker, Keyed("priority"))
    pages = [on.insert([number], priority=priority)[0].tolist() for number, priority in enumerate((2, 0, 3))]
    on.insert([1], priority=5)
    on.insert([1], priority=1)
    freed = [on.cache.evict(1).tolist() for _ in range(3)]
    assert freed == [pages[0], pages[2], pages[1]], "the priority of a prefix is not the highest of its insertions"


def check_evicts_everything_that_is_unlocked(maker: Maker) -> None:
    on = _new(maker)
    kept, inserted = on.insert(range(5))
    on.cache.lock(inserted.handle)
    free = [page for number in range(100, 110) for page in on.insert([number, number], f"tenant{number % 3}:")[0]]
    assert on.cache.num_evictable == len(free), f"{on.cache.num_evictable} pages are evictable, {len(free)} are unlocked"
    assert sorted(evict_all(on.cache).tolist()) == sorted(free), "evict returns other pages than the unlocked ones"
    _check_counts(on.cache, kept.tolist(), locked=5)
    assert on.find(range(5)) == kept.tolist(), "evict removed a locked prefix"
    on.cache.unlock(inserted.handle)
    assert sorted(on.cache.evict(1000)) == sorted(kept), "evict of more pages than there are does not return all that are evictable"
    _check_counts(on.cache, [], locked=0)
    assert on.find(range(5)) == [], "match finds a prefix of an empty cache"


def _outlines_parents_before_children(maker: Maker) -> None:
    on = _new(maker)
    on.insert(range(6))
    on.insert([*range(3), 9, 9], "one:")
    on.insert([*range(3), 9, 9])
    cache: Any = on.cache
    runs = cache.outline(100)
    assert bool(runs), "the outline of a cache with prefixes is empty"
    assert sum(run.tokens for run in runs) == len(_owned(on.cache)) * on.page_size, "the outline shows another number of tokens"
    for place, run in enumerate(runs):
        assert -1 <= run.parent < place, "a run of the outline stands before its parent"
        start = 0 if run.parent < 0 else runs[run.parent].start + runs[run.parent].tokens
        assert run.start == start, "a run of the outline does not begin where its parent ends"
    assert {run.namespace for run in runs} == {"", "one:"}, "the outline shows prefixes under other namespaces than their own"
    assert len(cache.outline(2)) <= 2, "the outline has more runs than its limit"


def _repairs_its_locks(maker: Maker) -> None:
    on = _new(maker)
    pages, inserted = on.insert(range(4))
    other, _ = on.insert([7, 8])
    for _ in range(3):  # a lock that is never released
        on.cache.lock(inserted.handle)
    held = on.cache.match(on.tokens([7, 8])).handle
    on.cache.lock(held)
    cache: Any = on.cache
    cache.relock([held])
    _check_counts(on.cache, [*pages, *other], locked=2)
    on.cache.unlock(held)
    _check_counts(on.cache, [*pages, *other], locked=0)
    cache.relock([held, inserted.handle, held])  # two requests hold one prefix
    on.cache.unlock(held)
    _check_counts(on.cache, [*pages, *other], locked=6)
    on.cache.unlock(held)
    _check_counts(on.cache, [*pages, *other], locked=4)


def _agrees_with_a_dictionary(maker: Maker) -> None:
    try:
        from frame.testing.scheduling.prefix_cache_machine import run_machine
    except ImportError as error:
        raise SkipCheck("hypothesis, which draws the calls, is not installed") from error
    run_machine(lambda page_size, _: maker.make(page_size), maker.page_sizes, maker.subject.setting.thorough)


def _owned(cache: PrefixCache) -> list[int]:
    return [int(page) for pages in cache.audit() for page in pages]


def _check_counts(cache: PrefixCache, owned: Iterable[int], locked: int) -> None:
    check_integrity(cache)
    expected, pages = sorted(owned), sorted(_owned(cache))
    assert pages == expected, f"audit yields {len(pages)} pages, the cache owns {len(expected)}, or others"
    assert cache.num_locked == locked, f"num_locked is {cache.num_locked}, {locked} pages are locked"
    evictable = len(expected) - locked
    assert cache.num_evictable == evictable, f"num_evictable is {cache.num_evictable}, {evictable} pages are unlocked"
