"""The conformance suite of KV cache tiers: blocks by key, jobs, buffers, quota, and places that
change. Must not know a plugin by name.

A tier that has a quota or a place has the static method `make_conformance_options(folder,
num_blocks, context)`: the options of a tier that holds at most `num_blocks` blocks, in `folder`
where it has files. Without it, the checks of both are skipped.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from frame.testing.conformance import Check, SkipCheck, Subject, find_checks, unchanged_process
from frame.testing.kv_tier import byte_checks, cost_checks, kept_checks, place_checks, use_checks
from frame.testing.kv_tier.rig import NUM_BLOCKS, PATIENCE, Make, Rig, make_keys

CLOSE_SECONDS = 4.0  # the contract allows one; a busy machine takes longer


def suite(subject: Subject) -> Iterator[Check]:
    """`kv_tier/1`."""
    keeps = getattr(subject.record.capabilities, "keeps", False)
    others = (cost_checks, place_checks, use_checks, *((kept_checks,) if keeps else ()), byte_checks)
    modules = (__name__, *(module.__name__ for module in others))
    for name, check in (each for module in modules for each in find_checks(module)):
        yield Check(name, partial(_run, check, subject))


def _run(check: Any, subject: Subject) -> None:
    rigs: list[Rig] = []
    with tempfile.TemporaryDirectory() as folder:

        def make(**arguments: Any) -> Rig:
            rigs.append(Rig(subject, Path(folder) / "tier", **arguments))
            return rigs[-1]

        try:
            check(make)
        finally:
            for rig in rigs:
                rig.tier.close()


def check_an_empty_tier_holds_nothing(make: Make) -> None:
    tier = make().tier
    assert tier.match(make_keys(4)) == 0, "an empty tier matches keys"
    assert tier.match([]) == 0, "no keys are matched"
    assert tier.poll() == [], "poll returns a job that has not begun"


def check_blocks_are_returned_as_stored(make: Make) -> None:
    rig, keys = make(), make_keys(8)
    rig.store(keys)
    assert rig.tier.match(keys) == len(keys), f"{rig.tier.match(keys)} of {len(keys)} stored keys are matched"
    for some in (keys, keys[::-1], keys[2:5], keys[7:]):
        rig.load_all(some)


def check_buffers_are_blocks(make: Make) -> None:
    rig, keys = make(), make_keys(8)
    store, first = rig.begin_store(keys[:4])
    rig.tier.finish(store)
    rig.wait_for([store])
    load, loaded = rig.begin_load(keys[:4])
    rig.wait_for([load])
    other, second = rig.begin_store(keys[4:])
    held = [*loaded, *(buffer for buffer in second if buffer is not None)]
    for buffer in (*held, *(buffer for buffer in first if buffer is not None)):
        kind = (str(buffer.dtype), tuple(buffer.shape), buffer.is_contiguous())
        assert kind == ("torch.uint8", (rig.block_bytes,), True), f"a buffer is {kind[0]} {list(kind[1])}, not uint8 [{rig.block_bytes}]"
    starts = sorted(buffer.data_ptr() for buffer in held)
    assert len(held) == 8, "a store of new keys has no buffer for some"
    assert all(b - a >= rig.block_bytes for a, b in pairwise(starts)), "buffers share memory"
    rig.tier.finish(other)
    rig.wait_for([other])
    rig.tier.finish(load)


def check_real_sizes(make: Make) -> None:
    """Blocks of 1 MiB, a prompt of 600 blocks, and keys that are equal but for their last bytes."""
    rig, keys = make(block_bytes=1 << 20), make_keys(3)
    rig.store(keys)
    rig.load_all(keys)
    many, long = make(num_blocks=700), make_keys(600, "long")
    for first in range(0, 600, 100):
        many.store(long[first : first + 100])
    place = 0
    while place < len(long):  # a tier may match as many as one load takes
        matched = many.tier.match(long[place:])
        assert matched > 0, f"of a prompt of 600 stored blocks the first {place} are matched"
        many.load_all(long[place : place + matched])
        place += matched
    near = [long[0][:size] + bytes([each]) * (32 - size) for size in (8, 16, 24, 31) for each in (1, 2)]
    many.store(near)
    many.load_all(near)


def check_buffers_in_memory_hold_blocks_at_once(make: Make) -> None:
    """Of a tier that says `in_memory`: the device copies the buffers before `poll`."""
    rig, keys = make(), make_keys(4)
    if not rig.capabilities.in_memory:
        raise SkipCheck("the tier is not in_memory")
    rig.store(keys)
    _, buffers = rig.begin_load(keys)
    for key, buffer in zip(keys, buffers, strict=True):
        assert torch.equal(buffer, rig.make(key)), "the tier is in_memory, but a buffer does not hold its block before poll"


def check_match_counts_leading_keys(make: Make) -> None:
    rig, keys = make(), make_keys(6)
    rig.store([keys[0], keys[1], keys[3], keys[4]])
    assert rig.tier.match(keys) == 2, "match counts blocks beyond a hole"
    assert rig.tier.match(keys[2:]) == 0, "match counts blocks beyond a hole"
    assert rig.tier.match(keys[3:]) == 2, "match misses stored blocks"


def check_blocks_count_from_poll_on(make: Make) -> None:
    rig, keys = make(), make_keys(3)
    job, _ = rig.begin_store(keys)
    assert rig.tier.match(keys) == 0, "match counts blocks whose buffers are not filled"
    assert rig.tier.poll() == [], "poll returns a store before finish"
    rig.tier.finish(job)
    for _ in range(5):
        assert rig.tier.match(keys) == 0, "match counts blocks that poll has not returned"
        time.sleep(0.01)
    rig.wait_for([job])
    assert rig.tier.match(keys) == 3, "match misses blocks that poll has returned"


def check_uncommitted_blocks_are_not_kept(make: Make) -> None:
    rig, keys = make(), make_keys(4)
    for _ in range(5 * NUM_BLOCKS):
        job, buffers = rig.begin_store(keys)
        assert None not in buffers, "a block is held or being stored after finish without commit"
        rig.tier.finish(job, commit=False)
        assert rig.tier.match(keys) == 0, "finish without commit keeps blocks"
    time.sleep(0.02)
    assert rig.tier.poll() == [], "poll returns a store that was not committed"
    assert rig.tier.match(keys) == 0, "finish without commit keeps blocks"
    rig.store(keys)
    rig.load_all(keys)


def check_held_blocks_get_no_buffer(make: Make) -> None:
    rig, keys = make(), make_keys(4)
    rig.store(keys[:2])
    job, buffers = rig.begin_store(keys)
    assert [buffer is None for buffer in buffers] == [True, True, False, False], "store has buffers for held blocks, or none for new ones"
    other, others = rig.begin_store(keys[1:])
    assert others == [None] * 3 or tuple(others) == (None,) * 3, "store has buffers for blocks that another job stores"
    rig.tier.finish(job)
    rig.tier.finish(other)
    results = rig.wait_for([job, other])
    assert (results[job].num_blocks, results[other].num_blocks) == (4, 3), "held blocks do not count as stored"
    rig.load_all(keys)


def check_a_cancelled_store_frees_its_keys(make: Make) -> None:
    rig, keys = make(), make_keys(3)
    first, _ = rig.begin_store(keys)
    second, _ = rig.begin_store(keys)
    rig.tier.finish(first, commit=False)
    rig.tier.finish(second, commit=False)
    assert None not in rig.begin_store(keys)[1], "keys of a cancelled store cannot be stored"


def check_keys_are_compared_whole(make: Make) -> None:
    rig, (one, other) = make(), make_keys(2)
    keys = [one[:16] + other[16:], one, other[:16] + one[16:], one[:31] + bytes([one[31] ^ 1]), other]
    rig.store(keys[:1])
    assert rig.count_held(keys) == 1, "keys that are equal in one half are taken for each other"
    rig.store(keys[1:])
    rig.load_all(keys)


def check_jobs_end_once(make: Make) -> None:
    rig, keys = make(), make_keys(4)
    rig.store(keys)
    job, buffers = rig.begin_load(keys)
    rig.compare(keys, buffers, rig.wait_for([job])[job])
    for _ in range(3):
        assert rig.tier.poll() == [], "poll returns a job twice"
        time.sleep(0.005)
    rig.tier.finish(job)
    assert rig.tier.poll() == [], "poll returns a job after finish"


def check_jobs_have_their_numbers(make: Make) -> None:
    rig, keys = make(num_blocks=32), make_keys(12)
    numbers = (7, 1 << 40, 0, 12)
    for number, start in zip(numbers, range(0, 12, 3), strict=True):
        rig.begin_store(keys[start : start + 3], number)
    for number in reversed(numbers):
        rig.tier.finish(number)
    rig.wait_for(numbers)
    spans = {number: keys[start : start + 1 + start // 3] for number, start in zip(numbers, (0, 2, 4, 8), strict=True)}
    buffers = {number: rig.begin_load(span, number)[1] for number, span in spans.items()}
    for number, result in rig.wait_for(numbers).items():
        assert result.num_blocks == len(spans[number]), "the numbers of jobs are mixed up"
        rig.compare(spans[number], buffers[number], result)
        rig.tier.finish(number)


def check_abandoned_loads_are_not_returned(make: Make) -> None:
    rig, keys = make(), make_keys(8)
    rig.store(keys)
    for _ in range(3 * NUM_BLOCKS):
        abandoned, _ = rig.begin_load(keys[:4])
        rig.tier.finish(abandoned)
        job, buffers = rig.begin_load(keys[4:])
        result = rig.wait_for([job])[job]
        rig.compare(keys[4:], buffers, result)
        assert result.num_blocks == 4, "a load fails after one that was abandoned"
        rig.tier.finish(job)
    time.sleep(0.02)
    assert rig.tier.poll() == [], "poll returns a load that was abandoned"


def check_abandoned_loads_write_to_no_other_buffer(make: Make) -> None:
    """A load may still write when it is given up: its buffers are none of a store that begins
    then."""
    rig, keys = make(num_blocks=4 * NUM_BLOCKS, block_bytes=4 << 20), make_keys(2)
    rig.store(keys)
    for turn, pause in enumerate((0.0, 0.001, 0.002, 0.004, 0.0, 0.003)):
        others = make_keys(2, f"turn {turn}-")
        contents = [rig.make(key) for key in others]
        abandoned, _ = rig.begin_load(keys)
        time.sleep(pause)
        rig.tier.finish(abandoned)
        job = rig.next_job()
        buffers = rig.tier.store(job, others)
        if buffers is None:
            continue
        for content, buffer in zip(contents, buffers, strict=True):
            if buffer is not None:
                buffer.copy_(content)
        rig.tier.finish(job)
        rig.wait_for([job])
        rig.load_all(others)


def check_loads_of_one_block_at_once(make: Make) -> None:
    rig, keys = make(), make_keys(4)
    rig.store(keys)
    loads = [rig.begin_load(keys) for _ in range(3)]
    results = rig.wait_for([job for job, _ in loads])
    for job, buffers in loads:
        assert results[job].num_blocks == 4, "loads of one block at the same time fail"
        rig.compare(keys, buffers, results[job])
        rig.tier.finish(job)


def check_missing_blocks_fail_alone(make: Make) -> None:
    rig, keys = make(), make_keys(5)
    rig.store([keys[0], keys[2], keys[4]])
    for some, leading in (([keys[0], keys[1], keys[2]], 1), ([keys[3]], 0)):
        job = rig.next_job()
        buffers = rig.tier.load(job, some)
        if buffers is not None:
            result = rig.wait_for([job])[job]
            assert result.num_blocks == leading, f"a load with {leading} blocks before a missing one ends with {result.num_blocks}"
            rig.compare(some, buffers, result)
            rig.tier.finish(job)
        rig.load_all([keys[0], keys[2], keys[4]])
    assert rig.tier.match(keys) == 1, "a failed load changes what is held"
    rig.store([keys[1], keys[3]])
    rig.load_all(keys)


def check_buffers_stay_until_finish(make: Make) -> None:
    rig, keys, others = make(), make_keys(4), make_keys(6 * NUM_BLOCKS, "other")
    rig.store(keys[:2])
    load, loaded = rig.begin_load(keys[:2])
    result = rig.wait_for([load])[load]
    store, _ = rig.begin_store(keys[2:])
    for start in range(0, len(others), 4):
        rig.store(others[start : start + 4])
        rig.load(others[start : start + 2])
    rig.compare(keys[:2], loaded, result)
    rig.tier.finish(load)
    rig.tier.finish(store)
    rig.wait_for([store])
    rig.load_all(keys[2:])


def check_blocks_in_use_are_not_evicted(make: Make) -> None:
    """A block that is loaded is served until it was read."""
    rig, keys, others = make(), make_keys(4), make_keys(3 * NUM_BLOCKS, "other")
    rig.store(keys)
    jobs = []
    for start in range(0, len(others), 4):
        load, loaded = rig.begin_load(keys)
        store = rig.next_job()
        buffers = rig.tier.store(store, others[start : start + 4])
        for key, buffer in zip(others[start:], buffers or (), strict=False):
            if buffer is not None:
                buffer.copy_(rig.make(key))
        if buffers is not None:
            rig.tier.finish(store)
            jobs.append(store)
        results = rig.wait_for([load, *jobs])
        jobs.clear()
        assert results[load].num_blocks == 4, f"a block was evicted while it was loaded: {results[load].error}"
        rig.compare(keys, loaded, results[load])
        rig.tier.finish(load)


def check_clear_leaves_jobs_alone(make: Make) -> None:
    """What a job uses stays; what is held afterwards is as it was."""
    rig, keys, others = make(), make_keys(8), make_keys(4, "other")
    rig.store(keys)
    load, loaded = rig.begin_load(keys[:4])
    store, _ = rig.begin_store(others)
    rig.tier.clear()
    rig.tier.finish(store)
    results = rig.wait_for([load, store])
    assert (results[load].num_blocks, results[store].num_blocks) == (4, 4), "clear drops the blocks of a job"
    rig.compare(keys[:4], loaded, results[load])
    rig.tier.finish(load)
    if held := rig.tier.match(keys):
        rig.load_all(keys[:held])
    rig.store(keys)
    rig.load_all(keys)


def check_the_quota_is_kept(make: Make) -> None:
    rig, keys = make(), make_keys(4 * NUM_BLOCKS)
    rig.require_quota()
    for start in range(0, len(keys), 2):
        rig.store(keys[start : start + 2])
        held = rig.count_held(keys)
        assert held <= NUM_BLOCKS, f"{held} blocks are held, and {NUM_BLOCKS} are allowed"
        assert rig.tier.match(keys[start : start + 2]) == 2, "a block that was just stored is not held"
    assert held > NUM_BLOCKS // 2, f"{held} blocks are held, and {NUM_BLOCKS} are allowed"
    assert rig.num_bytes <= 4 * NUM_BLOCKS * rig.block_bytes, f"the tier has allocated {rig.num_bytes // rig.block_bytes} buffers"


def check_removed_blocks_are_listed(make: Make) -> None:
    """What was stored and is not listed as removed is held, and nothing else."""
    rig, keys = make(), make_keys(4 * NUM_BLOCKS)
    rig.require_quota()
    if rig.tier.list_removed() is None:
        raise SkipCheck("the tier does not list removed blocks")
    known: set[bytes] = set()
    for turn, start in enumerate((*range(0, len(keys), 2), *range(0, len(keys), 4))):
        rig.store(keys[start : start + 2])
        known |= set(keys[start : start + 2])
        if turn == NUM_BLOCKS:
            rig.tier.clear()
        removed = rig.tier.list_removed() or []
        assert len(removed) == len(set(removed) & known), "a block is listed as removed twice, or was not stored"
        known -= set(removed)
        held = {key for key in keys if rig.tier.match([key])}
        assert known == held, f"{len(known - held)} blocks left the tier and are not listed, {len(held - known)} are listed and held"


def check_stores_under_way_count(make: Make) -> None:
    rig, keys = make(), make_keys(4 * NUM_BLOCKS)
    rig.require_quota()
    begun = {}
    for key in keys:
        job = rig.next_job()
        buffers = rig.tier.store(job, [key])
        if buffers is not None and buffers[0] is not None:
            buffers[0].copy_(rig.make(key))
            begun[job] = key
    for job in begun:
        rig.tier.finish(job)
    rig.wait_for(begun)
    held = [key for key in keys if rig.tier.match([key])]
    assert len(held) <= NUM_BLOCKS, f"{len(held)} blocks are held, and {NUM_BLOCKS} are allowed"
    for key in held:
        rig.load_all([key])
    rig.store(keys[:3])
    rig.load_all(keys[:3])


def check_the_least_recently_used_is_evicted(make: Make) -> None:
    rig, keys = make(), make_keys(NUM_BLOCKS + NUM_BLOCKS // 2)
    rig.require_quota()
    for key in keys[:NUM_BLOCKS]:
        rig.store([key])
    rig.load_all(keys[:1])
    for key in keys[NUM_BLOCKS:]:
        rig.store([key])
    assert rig.tier.match(keys[:1]) == 1, "a block that was just loaded is evicted before blocks that were not used"
    held = [bool(rig.tier.match([key])) for key in keys[1:]]
    assert held == sorted(held), "blocks are evicted before ones that were stored earlier"


def check_a_block_that_has_changed_is_not_served(make: Make) -> None:
    """What writes to a buffer after `finish` is a defect; the tier must notice it or not share the
    buffer."""
    rig, keys = make(), make_keys(3)
    job, buffers = rig.begin_store(keys)
    rig.tier.finish(job)
    rig.wait_for([job])
    if buffers[1] is not None:
        buffers[1][17] += 1
    count = rig.load(keys)
    assert count in (1, 3), f"one block of three was changed, and {count} are loaded"
    load, loaded = rig.begin_load(keys[:1])
    rig.wait_for([load])
    rig.tier.finish(load)
    loaded[0][5] += 1
    rig.load(keys[:1])
    rig.store(keys)
    rig.load_all(keys)


def check_random_calls(make: Make) -> None:
    """Stores, loads and their ends in any order give the contents of a dictionary."""
    rng, rig, keys = random.Random(0), make(), make_keys(3 * NUM_BLOCKS)
    stores: dict[int, list[bytes]] = {}
    loads: dict[int, tuple[list[bytes], Any]] = {}
    committed: set[bytes] = set()
    for _ in range(600):
        start, job = rng.randrange(len(keys) - 4), rig.next_job()
        some, action = keys[start : start + rng.randint(1, 4)], rng.randrange(5)
        assert set(some[: rig.tier.match(some)]) <= committed, "match counts a block that was never committed"
        if action == 0 and (buffers := rig.tier.store(job, some)) is not None:
            stores[job] = some
            for key, buffer in zip(some, buffers, strict=True):
                if buffer is not None:
                    buffer.copy_(rig.make(key))
        elif action == 1 and (buffers := rig.tier.load(job, some)) is not None:
            loads[job] = (some, buffers)
        elif action == 2 and stores:
            job = rng.choice(list(stores))
            some = stores.pop(job)
            rig.tier.finish(job, commit=(is_kept := rng.random() < 0.8))
            if is_kept:
                committed.update(some)
                _end_loads(rig, loads, rig.wait_for([job, *loads]))
        elif action == 3 and loads:
            job = rng.choice(list(loads))
            del loads[job]
            rig.tier.finish(job)
        elif action == 4:
            _end_loads(rig, loads, rig.wait_for(loads))
    for job in stores:
        rig.tier.finish(job, commit=False)
    _end_loads(rig, loads, rig.wait_for(loads))
    rig.store(keys[:4])
    rig.load_all(keys[:4])


def _end_loads(rig: Rig, loads: dict[int, tuple[list[bytes], Any]], results: Any) -> None:
    for job, (keys, buffers) in loads.items():
        rig.compare(keys, buffers, results[job])
        rig.tier.finish(job)
    loads.clear()


def check_close_ends_everything(make: Make) -> None:
    before = {*threading.enumerate()}
    with unchanged_process("a tier changes"):
        rig, keys = make(), make_keys(8)
        rig.store(keys[:4])
        rig.store(make_keys(12, "others"))  # whose buffers are free
        _, loaded = rig.begin_load(keys[:4])
        store, buffers = rig.begin_store(keys[4:])
        rig.tier.finish(store)
        began = time.monotonic()
        rig.tier.close()
        assert time.monotonic() - began < CLOSE_SECONDS, f"close takes {time.monotonic() - began:.1f} seconds"
        end = time.monotonic() + PATIENCE
        while {*threading.enumerate()} - before and time.monotonic() < end:
            time.sleep(0.01)
        assert not {*threading.enumerate()} - before, "threads go on after close"
    del loaded, buffers
    if not rig.is_persistent:
        assert rig.count_memory() == 0, "memory of the tier is in use after close"


def check_the_memory_comes_from_the_context(make: Make) -> None:
    """The device copies to and from this memory, which may be page-locked."""
    rig, keys = make(), make_keys(2)
    _, buffers = rig.begin_store(keys)
    arrays = [array for reference in rig.memory if (array := reference()) is not None]
    spans = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    if not rig.num_bytes:
        raise SkipCheck("the tier has memory of its own")
    for buffer in buffers:
        start = 0 if buffer is None else buffer.data_ptr()
        assert any(low <= start < high for low, high in spans), "a buffer is not of the memory that the context allocates"
