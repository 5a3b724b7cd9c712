"""The conformance suite of KV allocators: single calls, traces of requests that come, grow and are
preempted, pools of a million pages, and a scheduler. Must not know an allocator by name.

Every call goes through `Pool`, which knows the pages that are allocated and checks each answer.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np

from frame.core.interfaces.kv_allocator import KVAllocator, KVAllocatorCapabilities, KVAllocatorContext
from frame.core.kv_cache.page_allocator import PagedAllocator
from frame.testing.conformance import Check, Subject, collect, unchanged_process
from frame.testing.fake_runner import FakeRunner
from frame.testing.scheduler_rig import InOrder, SchedulerRig, add_requests, make_tight_config

SIZES = (2, 3, 64, 65, 1000)
LARGE = 70_001  # pages: page indices need more than 16 bits
HUGE = 1 << 20
NUM_EVENTS = 5000
NUM_CALLS = 1500  # after which the memory of an allocator is measured
MAX_STEPS = 1.5  # times the interpreter's steps of a call for 64 pages, for 4,096
MAX_GROWTH = 6.0  # times the time of a page, in a pool of 256 times as many
FEW_SECONDS = 4e-5  # of a page, which may be any factor of the time in a small pool

Make = Callable[..., KVAllocator]


class Pool:
    """An allocator, its allocated pages, and whether it gets `after`."""

    def __init__(self, make: Make, num_pages: int, wants_after: bool, **context: Any) -> None:
        self.allocator = make(num_pages, **context)
        self.num_pages = num_pages
        self.wants_after = wants_after
        self.is_out = np.zeros(num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        return self.num_pages - 1 - int(np.count_nonzero(self.is_out))

    def alloc(self, count: int, after: Sequence[int] | None = None) -> np.ndarray:
        hints = () if after is None or not self.wants_after else (np.array(after, np.int32),)
        before = [hint.copy() for hint in hints]
        pages = self.allocator.allocate_pages(count, *hints)
        assert all(map(np.array_equal, hints, before)), "allocate_pages() wrote to `after`"
        what = f"allocate_pages({count})"
        dtype = getattr(pages, "dtype", type(pages))
        assert isinstance(pages, np.ndarray) and pages.dtype == np.int32, f"{what} returned {dtype}, not int32"
        assert pages.shape == (count,), f"{what} returned the shape {pages.shape}"
        assert 0 not in pages, f"{what} returned page 0, which is reserved"
        assert ((pages > 0) & (pages < self.num_pages)).all(), f"{what} returned page {int(pages.max())} of 1 to {self.num_pages - 1}"
        assert len(np.unique(pages)) == count, f"{what} returned a page twice"
        assert not self.is_out[pages].any(), f"{what} returned page {int(pages[self.is_out[pages]][0])}, which is allocated"
        self.is_out[pages] = True
        self.check_count()
        return pages

    def free(self, pages: np.ndarray) -> None:
        self.is_out[pages] = False
        before = pages.copy()
        self.allocator.free_pages(pages)
        assert np.array_equal(pages, before), "free_pages() wrote to the pages that it was given"
        self.check_count()

    def check_count(self) -> None:
        assert self.allocator.num_free == self.num_free, f"num_free is {self.allocator.num_free}, and {self.num_free} pages are free"

    def drain(self) -> np.ndarray:
        """Allocate every page that is left."""
        return self.alloc(self.num_free) if self.num_free else np.empty(0, np.int32)


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `kv_allocator`; checks of `after` for a record with this capability."""
    can = subject.record.capabilities
    wants_after = isinstance(can, KVAllocatorCapabilities) and can.after

    def make(num_pages: int, page_size: int = 16, kind: Any = "tokens") -> KVAllocator:
        allocator: KVAllocator = subject.target(KVAllocatorContext(num_pages, page_size, kind), subject.options)
        return allocator

    return (check for check in collect(__name__, make, wants_after) if wants_after or not check.name.startswith("after_"))


def check_pools_of_all_sizes(make: Make, wants_after: bool) -> None:
    """Every page but 0 is allocated, in one call and page by page."""
    for size in SIZES:
        pool = Pool(make, size, wants_after)
        pool.check_count()
        pages = pool.drain()
        pool.free(pages)
        for _ in range(size - 1):
            pool.alloc(1, [0])
        assert not pool.allocator.num_free, f"num_free is {pool.allocator.num_free} in a full pool"
    for kind, page_size in (("window", 16), ("snapshot", 0), ("write_once", 0)):
        Pool(make, 9, wants_after, kind=kind, page_size=page_size).drain()


def check_pages_come_back(make: Make, wants_after: bool) -> None:
    """In any order and grouping: a page after another, all at once, backwards, or in pairs."""
    for seed, group in enumerate((1, 2, 7, 63, 200)):
        pool, rng = Pool(make, 201, wants_after), random.Random(seed)
        for _ in range(3):
            order = rng.sample(pool.drain().tolist(), 200)
            for start in range(0, 200, group):
                pool.free(np.array(order[start : start + group], np.int32))
            assert pool.num_free == 200


def check_freed_pages_are_allocated_again(make: Make, wants_after: bool) -> None:
    """In a full pool the pages that were freed are the only ones left, whichever they are."""
    pool, rng = Pool(make, 500, wants_after), random.Random(2)
    pages = pool.drain().tolist()
    for count in (1, 1, 2, 50, 499, 3, 128):
        chosen = rng.sample(pages, count)
        pool.free(np.array(chosen, np.int32))
        assert set(pool.drain().tolist()) == set(chosen), f"of {count} pages that were freed, others came back"


def check_calls_between_are_of_any_size(make: Make, wants_after: bool) -> None:
    """5,000 allocations and frees of 1 to 40 pages at random, from an empty to a full pool."""
    pool, rng, held = Pool(make, 997, wants_after), random.Random(3), list[np.ndarray]()
    for event in range(NUM_EVENTS):
        target = 0.5 + 0.5 * np.sin(event / 300)
        if held and rng.random() > target:
            pool.free(held.pop(rng.randrange(len(held))))
        elif pool.num_free:
            held.append(pool.alloc(min(pool.num_free, rng.randint(1, 40)), [0] if rng.random() < 0.5 else None))
    for pages in held:
        pool.free(pages)
    pool.drain()


def check_cycles_of_preemption(make: Make, wants_after: bool) -> None:
    """Requests that grow by a page each until the pool is full; then the newest one loses all of
    its pages."""
    pool, rows = Pool(make, 258, wants_after), list[list[int]]()
    for event in range(NUM_EVENTS // 4):
        if len(rows) < 12 and pool.num_free > 20:
            rows.append(pool.alloc(3 + event % 9).tolist())
        elif pool.num_free >= len(rows):
            for row, page in zip(rows, pool.alloc(len(rows), [row[-1] for row in rows]).tolist(), strict=True):
                row.append(page)
        else:
            newest = rows.pop()
            pool.free(np.array(newest[::2] + newest[1::2], np.int32))
    for row in rows:
        pool.free(np.array(row, np.int32))
    assert len(pool.drain()) == 257


def check_large_pools(make: Make, wants_after: bool) -> None:
    """More than 65,536 pages: each is allocated once, freed and allocated again."""
    pool = Pool(make, LARGE, wants_after)
    first, second = pool.alloc(66_000), pool.alloc(4000)
    pool.free(first[::3].copy())
    pool.free(second)
    pool.alloc(4000 + len(first[::3]))


def check_arrays_are_copied(make: Make, wants_after: bool) -> None:
    """The engine writes to arrays that it got or passed: the allocator is not changed by it."""
    clean, reused = Pool(make, 300, wants_after), Pool(make, 300, wants_after)
    held = []
    for count in (5, 1, 40, 12):
        ours, theirs = clean.alloc(count, [0]), reused.alloc(count, [0])
        held.append(ours.copy())
        theirs.fill(0)
    for pages in (held[2][::-1], held[0][1:3], held[3]):
        passed = pages.copy()
        clean.free(pages.copy())
        reused.free(passed)
        passed.fill(1)
    for count in (3, 1, 200, clean.num_free - 204):
        assert np.array_equal(clean.alloc(count), reused.alloc(count)), "an array that changed after its call changed later pages"


def check_views_are_taken(make: Make, wants_after: bool) -> None:
    """Pages and hints that are views: with steps, backwards, read-only."""
    pool = Pool(make, 300, wants_after)
    pages = pool.alloc(100)
    backwards = pages[::-2]
    backwards.flags.writeable = False
    pool.free(backwards)
    table = np.repeat(pages[None, ::2], 4, axis=0)
    pool.free(table[1])
    assert pool.num_free == 299
    pool.drain()


def check_equal_calls_choose_equal_pages(make: Make, wants_after: bool) -> None:
    """A run can be repeated: the pages depend on the calls alone."""
    runs = []
    for _ in range(2):
        pool, rng, chosen, held = Pool(make, 400, wants_after), random.Random(5), list[int](), list[np.ndarray]()
        for _ in range(300):
            if held and rng.random() < 0.5:
                pool.free(held.pop(rng.randrange(len(held))))
            elif pool.num_free > 9:
                held.append(pool.alloc(rng.randint(1, 9), [int(held[-1][-1])] if held else None))
                chosen += held[-1].tolist()
        runs.append(chosen)
    assert runs[0] == runs[1], "equal calls chose other pages"


def check_pools_are_apart(make: Make, wants_after: bool) -> None:
    """Two pools of one process, as of cache groups or attention groups, of two sizes or of one."""
    for sizes in ((50, 90), (90, 90)):
        pools, alone = [Pool(make, size, wants_after) for size in sizes], [Pool(make, size, wants_after) for size in sizes]
        for shift in range(4):
            held = [pool.alloc(20 + 9 * shift + place) for place, pool in enumerate(pools)]
            for place, (pool, pages) in enumerate(zip(pools, held, strict=True)):
                pool.free(pages[:: 1 if place else -1])
        for place, pool in enumerate(alone):
            for shift in range(4):
                pool.free(pool.alloc(20 + 9 * shift + place)[:: 1 if place else -1])
        for pool, twin in zip(pools, alone, strict=True):
            assert np.array_equal(pool.drain(), twin.drain()), "an allocator of another pool changed the pages of this one"


def check_work_is_done_in_batches(make: Make, wants_after: bool) -> None:
    """About as many steps of the interpreter for 4,096 pages as for 64."""
    counts = []
    for count in (64, 4096):
        pool = Pool(make, 20_000, wants_after)
        allocator, last = pool.allocator, pool.alloc(count)
        pool.free(pool.alloc(count))
        hints = (last,) if wants_after else ()
        pages = [allocator.allocate_pages(count)]
        steps = [_count_steps(lambda a=allocator, n=count, p=pages, h=hints: p.append(a.allocate_pages(n, *h)))]  # type: ignore[misc]
        steps.append(_count_steps(lambda a=allocator, p=pages: a.free_pages(p[0])))  # type: ignore[misc]
        counts.append(steps)
    for call, few, many in zip(("allocate_pages", "free_pages"), *counts, strict=True):
        assert many <= MAX_STEPS * few + 100, f"{call} takes {few} steps of the interpreter for 64 pages and {many} for 4,096"


def check_time_does_not_grow_with_the_pool(make: Make, wants_after: bool) -> None:
    """Single pages of a pool of a million take about the time of those of a pool of 4,096."""
    small, large = (min(_time_pages(make, size, wants_after) for _ in range(3)) for size in (HUGE // 256, HUGE))
    slower = large / max(small, 1e-9)
    sentence = f"a page of a pool of {HUGE} pages takes {large * 1e6:.0f} µs, {slower:.0f} times the time of one of {HUGE // 256}"
    assert slower <= MAX_GROWTH or large < FEW_SECONDS, sentence


def check_process_and_memory(make: Make, wants_after: bool) -> None:
    """Thousands of calls leave the process alone, and no memory behind."""
    pool, sizes, rng = Pool(make, 256, wants_after), [], random.Random(8)
    with unchanged_process("the allocator changed"):
        tracemalloc.start()
        try:
            for event in range(3 * NUM_CALLS):
                pages = pool.alloc(1 + event % 5, [rng.randrange(256)] if event % 5 == 0 else None)
                pool.free(pages)
                if event % NUM_CALLS == NUM_CALLS - 1:
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    grown = sizes[2] - sizes[1]
    assert grown < NUM_CALLS * 2, f"{NUM_CALLS} more calls took {grown} bytes that are not given back"


def check_a_scheduler_runs_to_the_end(make: Make, wants_after: bool) -> None:
    """Requests of a scheduler with few pages, whose pages are checked after every step."""
    for seed, overlap in ((0, True), (1, False), (2, True)):
        add_requests(_Rig(make, wants_after, overlap), seed, abort_share=0.1)


class _Rig(SchedulerRig):
    """A scheduler in short supply of pages, which this allocator chooses."""

    def __init__(self, make: Make, wants_after: bool, overlap: bool) -> None:
        self._make, self._wants_after = make, wants_after
        super().__init__(make_tight_config(2, 40, overlap=overlap), InOrder())

    def make_memory(self, is_invalid: Any) -> Any:
        pools, _, runner = super().make_memory(is_invalid)
        assert isinstance(runner, FakeRunner)
        size = self.config.num_pages
        return pools, PagedAllocator(size, self._make(size, self.config.page_size), wants_after=self._wants_after), runner


def check_after_is_a_hint(make: Make, wants_after: bool) -> None:
    """`after` may be any page: allocated or free, 0, the last one of the pool, or the same for two
    rows that share a prefix."""
    for seed in range(4):
        pool, rng, held = Pool(make, 120, wants_after), random.Random(seed), list[np.ndarray]()
        for _ in range(400):
            rows = rng.randint(1, 6)
            after = [rng.choice((0, 119, rng.randrange(120))) for _ in range(rows)]
            if rng.random() < 0.3:
                after[-1] = after[0]
            count = rows * rng.choice((1, 1, 2, 5))
            if pool.num_free >= count:
                held.append(pool.alloc(count, after))
            while held and (pool.num_free < 30 or rng.random() < 0.3):
                pool.free(held.pop(rng.randrange(len(held))))


def check_after_in_a_nearly_full_pool(make: Make, wants_after: bool) -> None:
    """New rows where few pages are left for each, which all stay in the pool."""
    for rows in (1, 2, 5):
        for left in range(rows, 4 * rows + 2):
            pool = Pool(make, 80, wants_after)
            pool.alloc(79 - left)
            pool.free(pool.alloc(rows, [0] * rows))
            pool.alloc(rows, [0] * rows)
            pool.drain()


def check_after_takes_no_memory(make: Make, wants_after: bool) -> None:
    """A row that grows and ends, thousands of times, in a pool that is nearly empty."""
    pool, sizes = Pool(make, 2000, wants_after), [0, 0]
    first = pool.alloc(1)
    tracemalloc.start()
    try:
        for event in range(4 * NUM_CALLS):
            pool.free(pool.alloc(3, first.tolist()))
            half = event // (2 * NUM_CALLS)
            sizes[half] = max(sizes[half], tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] < 1.2 * sizes[0] + NUM_CALLS * 8, f"{2 * NUM_CALLS} calls leave {sizes[0]} bytes, and twice as many {sizes[1]}"


def check_after_the_last_page(make: Make, wants_after: bool) -> None:
    """Rows that grow page by page until the pool is full."""
    for rows in (1, 2, 7):
        pool = Pool(make, 100, wants_after)
        last = pool.alloc(rows)
        while pool.num_free >= rows:
            last = pool.alloc(rows, last.tolist())
        pool.drain()


def _count_steps(call: Callable[[], Any]) -> int:
    """Bytecode instructions of a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _time_pages(make: Make, num_pages: int, wants_after: bool) -> float:
    """Seconds of CPU time of a page, allocated and freed alone in a pool that is half full."""
    allocator, calls = make(num_pages), 300
    pages = allocator.allocate_pages(num_pages - 1)
    allocator.free_pages(pages[::2].copy())
    singles = [allocator.allocate_pages(1) for _ in range(calls)]
    for page in singles:
        allocator.free_pages(page)
    hints = (singles[0],) if wants_after else ()
    start = time.process_time()
    for _ in range(calls):
        allocator.free_pages(allocator.allocate_pages(1, *hints))
    return (time.process_time() - start) / calls
