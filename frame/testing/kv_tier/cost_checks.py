"""Checks of what the methods of KV cache tiers cost: time, also beside a slow job, and memory over
many blocks. Used by the suite of the kind. Must not know a plugin by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from frame.testing.conformance import count_elements
from frame.testing.generators import count_pauses, measure_fastest
from frame.testing.kv_tier.rig import NUM_BLOCKS, Make, Rig, make_keys

MAX_WAIT = 5e-3  # in which a method computes nothing, for the shortest of several calls
MAX_SECONDS = 0.02  # of a method, for the fastest of several calls
MAX_MATCH = 1.8e-3  # of 16 keys
ROUNDS, REST = 4, 0.1  # of calls, one of which must keep the limits; seconds between two


def check_match_is_fast(make: Make) -> None:
    """The scheduler matches each waiting prompt: its time does not grow with what the tier
    holds."""
    seconds = []
    for count in (16, 600):
        rig, keys = make(num_blocks=700), make_keys(count)
        for first in range(0, count, 100):
            rig.store(keys[first : first + 100])
        seconds.append(measure_fastest(partial(rig.tier.match, keys[:16])))
    assert seconds[0] < MAX_MATCH, f"match of 16 keys takes {seconds[0] * 1e3:.1f} ms"
    assert seconds[1] < max(8 * seconds[0], MAX_MATCH / 5), f"match of 16 keys takes {seconds[1] * 1e3:.2f} ms among 600 blocks"


def check_methods_do_not_wait(make: Make) -> None:
    """The shortest call of each method counts, over several rounds: a busy machine delays some."""
    seconds: dict[str, float] = {}
    waits: dict[str, float] = {}
    for number in range(ROUNDS):
        if number:
            time.sleep(REST)
        rig = make(num_blocks=64, block_bytes=1 << 16, identity=f"round {number}")
        _measure_methods(rig, make_keys(16 if number else 48), seconds, waits)
        slow = {name: one for name, one in seconds.items() if one > MAX_SECONDS}
        slow |= {name: one for name, one in waits.items() if one > MAX_WAIT}
        if not slow:
            break
    assert not slow, f"{' and '.join(slow)} wait: {max(slow.values()):.3f} seconds at least"


def _measure_methods(rig: Rig, keys: list[bytes], seconds: dict[str, float], waits: dict[str, float]) -> None:
    """Lower the seconds of each method, and those in which it computes nothing, to what they are
    now."""

    def measure(name: str, call: Callable[[], Any]) -> Any:
        pauses, began, computed = count_pauses(), time.perf_counter(), time.thread_time()
        value = call()
        taken = time.perf_counter() - began
        seconds[name] = min(seconds.get(name, 1e9), taken)
        waited = taken - (time.thread_time() - computed) if count_pauses() > pauses else 0.0
        waits[name] = min(waits.get(name, 1e9), waited)
        return value

    for start in range(0, len(keys), 8):
        some = keys[start : start + 8]
        job, _ = rig.begin_store(some)
        measure("finish of a store", partial(rig.tier.finish, job))
        if not measure("poll", rig.tier.poll):
            rig.wait_for([job])
        measure("match", partial(rig.tier.match, keys))
        load = rig.next_job()
        if measure("load", partial(rig.tier.load, load, some)) is not None:
            measure("finish of a load", partial(rig.tier.finish, load))
        store = rig.next_job()
        if measure("store", partial(rig.tier.store, store, make_keys(8, f"more{start}"))) is not None:
            measure("finish without commit", partial(rig.tier.finish, store, commit=False))


def check_memory_does_not_grow(make: Make) -> None:
    rig, keys = make(block_bytes=64), make_keys(5000)
    rig.require_quota()
    sizes = []
    for start in range(0, len(keys), 8):
        rig.store(keys[start : start + 8])
        if start % 80 == 0:
            rig.load(keys[start : start + 2])
            if rig.tier.load(5, keys[:1]) is not None:
                rig.tier.finish(5)
        if start in (800, 4960):
            sizes.append((count_elements(rig.tier), rig.num_bytes, threading.active_count()))
    (before, allocated, threads), after = sizes
    assert after[0] <= before + 8 * NUM_BLOCKS, f"4,000 stores leave {after[0] - before} objects in the tier"
    assert after[1] <= allocated + 64 * NUM_BLOCKS, "each store allocates memory"
    assert after[2] <= threads, "each store leaves a thread"
