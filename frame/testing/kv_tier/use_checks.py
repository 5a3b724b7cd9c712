"""Checks of what counts as use of a block of a KV cache tier: loads that overlap, stores of held
blocks, and stores under way. Used by the suite of the kind. Must not know a plugin by name."""

from __future__ import annotations

import random
from typing import Any

from frame.testing.kv_tier.rig import NUM_BLOCKS, Make, Rig, make_keys


def _try_store(rig: Rig, keys: list[bytes]) -> int | None:
    """Begin a store and fill its buffers, where the tier has room for it now. -> job."""
    job = rig.next_job()
    buffers = rig.tier.store(job, keys)
    for key, buffer in zip(keys, buffers or (), strict=False):
        if buffer is not None:
            buffer.copy_(rig.make(key))
    return None if buffers is None else job


def check_loads_that_overlap_keep_their_buffers(make: Make) -> None:
    """Loads of the same blocks end in any order while others are stored: the buffers of those that
    go on hold their blocks."""
    rng, rig = random.Random(0), make(block_bytes=64)
    for turn in range(6):
        keys, loads = make_keys(4, f"{turn}-"), dict[int, Any]()
        rig.store(keys)
        for _ in range(rng.randint(2, 3)):
            some = rng.sample(keys, rng.randint(1, 4))
            job = rig.next_job()
            if (buffers := rig.tier.load(job, some)) is not None:
                loads[job] = (some, buffers)
        results = rig.wait_for(loads)
        for job in rng.sample(list(loads), len(loads)):
            some, buffers = loads.pop(job)
            rig.compare(some, buffers, results[job])
            rig.tier.finish(job)
            stores = [_try_store(rig, make_keys(2, f"other {turn} {job} {n}-")) for n in range(NUM_BLOCKS)]
            for store in (each for each in stores if each is not None):
                rig.tier.finish(store)
                rig.wait_for([store])


def check_the_last_used_blocks_are_held(make: Make) -> None:
    """Blocks are stored, stored again and loaded in any order: each is a use, also a store of what
    is held."""
    rng, rig, keys = random.Random(1), make(block_bytes=64), make_keys(2 * NUM_BLOCKS)
    rig.require_quota()
    used: list[bytes] = []  # the last one is the most recent
    for _ in range(150):
        key = rng.choice(used[-NUM_BLOCKS // 2 :]) if used and rng.random() < 0.6 else rng.choice(keys)
        if rng.random() < 0.6 or not rig.tier.match([key]):
            rig.store([key])
        else:
            rig.load_all([key])
        used = [*(each for each in used if each != key), key]
        held = rig.count_held(used[-NUM_BLOCKS // 2 :])
        assert held == min(len(used), NUM_BLOCKS // 2), f"{held} of the {NUM_BLOCKS // 2} blocks that were used last are held"


def check_blocks_held_and_stored_keep_to_the_quota(make: Make) -> None:
    """Stores that begin together while other blocks are held: all of them count."""
    rng, rig = random.Random(2), make(block_bytes=64)
    rig.require_quota()
    for turn in range(6):
        held = make_keys(rng.randint(4, NUM_BLOCKS), f"held {turn}-")
        for key in held:
            rig.store([key])
        stored = [make_keys(rng.randint(2, 6), f"stored {turn} {number}-") for number in range(4)]
        jobs = [job for some in stored if (job := _try_store(rig, some)) is not None]
        for job in rng.sample(jobs, len(jobs)):
            rig.tier.finish(job)
        rig.wait_for(jobs)
        count = rig.count_held([*held, *(key for some in stored for key in some)])
        assert count <= NUM_BLOCKS, f"{count} blocks are held after stores that began together, and {NUM_BLOCKS} are allowed"
        assert count, "no block is held after stores that began together"
        rig.tier.clear()
