"""Cache groups in the scheduler: windows that are freed, states and their checkpoints, and random
requests whose lengths lie around page, window, chunk and checkpoint boundaries.

The fake runner computes a token from what it reads back, checks every window that a row reads and
the state that it begins with, and bounds the pages that a row holds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from frame.core.interfaces.build import Limits
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache, PagePool
from frame.core.kv_cache.geometry import group_layers
from frame.loading.capacity import plan_pools
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.grouped_rig import GroupedRig
from tests.core.scheduling.small_rig import config, params, policy, prompt

WINDOW = PagePool("window", 41, 4, 10)
STATES = PagePool("snapshot", 9, 0)


def make(*further: PagePool, **changes: object) -> SchedulerRig:
    return GroupedRig(further, config(**changes), policy())


def cached(rig: SchedulerRig, tokens: Sequence[int], count: int = 1) -> int | None:
    rid = rig.add(tokens, params(max_tokens=count))
    finish(rig)
    return rig.requests[rid].cached


def finish(rig: SchedulerRig) -> None:
    """Step until idle; `SchedulerRig.run` would also flush the cache."""
    while not rig.scheduler.is_idle:
        rig.step()


def test_a_sequence_holds_its_window_and_no_more() -> None:
    rig = make(WINDOW)
    rig.add(prompt(20), params(max_tokens=60))
    maximum = 0
    while not rig.scheduler.is_idle:
        rig.step()
        groups = rig.scheduler._running.kv_manager.groups
        assert groups is not None
        if rig.scheduler.get_load()["running"]:
            maximum = max(maximum, len(groups.private_pages(0)) + len(groups.shared_pages(0)))
    assert 3 <= maximum <= (10 + 20) // 4 + 2
    rig.check()


def test_a_hit_ends_where_the_window_is_there() -> None:
    rig = make(WINDOW, token_budget=8)
    first = prompt(40)
    assert cached(rig, first) == 0
    assert cached(rig, first) == 39  # the last token is computed again
    assert cached(rig, [*first, 3, 4, 5]) == 40
    cache = rig.scheduler._running.kv_manager.cache
    rig.allocator.free(cache.evict_group(0, cache.count_evictable(0)))
    assert cached(rig, [*first, 3, 4, 5]) == 0  # the tokens are there, their window is not
    assert cached(rig, [*first, 3, 4, 5]) == 40
    rig.check()


def test_states_are_saved_at_chunk_ends_and_at_branches() -> None:
    rig = make(STATES, token_budget=16)
    first, other = prompt(38), [*prompt(21), 1, 2, 3, 4, 5, 6]
    assert cached(rig, first) == 0
    assert cached(rig, first) == 32  # the end of the last chunk that fills its pages
    assert cached(rig, other) == 16
    assert cached(rig, other) == 20  # where it branches off, its prefill left a state
    assert cached(rig, other) == 24  # and the second one where the cached tokens ended
    assert cached(rig, [*prompt(20), 9, 9, 9, 9, 9]) == 20
    rig.check()


def test_a_finished_answer_leaves_a_checkpoint() -> None:
    rig = make(STATES, max_context=200, num_pages=129)
    first = prompt(30)
    rid = rig.add(first, params(max_tokens=110))
    finish(rig)
    turn = [*first, *rig.requests[rid].got, 5, 6, 7]
    assert cached(rig, turn) == 128
    rig.check()


def test_a_request_waits_for_a_state() -> None:
    rig = make(PagePool("snapshot", 2, 0))
    for start in range(3):
        rig.add(prompt(6, start), params(max_tokens=3))
    rig.step()
    assert (rig.scheduler.get_load()["running"], rig.scheduler.get_load()["waiting"]) == (1, 2)
    rig.run()


def test_a_failed_step_loses_no_page() -> None:
    rig = make(WINDOW, STATES, token_budget=8)
    cached(rig, prompt(30))
    rig.add(prompt(33), params())
    batch = rig.scheduler.schedule_batch(rig.now)
    assert batch is not None
    rig.scheduler.fail_step(batch, "broken")
    rig.scheduler.check_integrity()
    rig.scheduler.flush_cache()
    assert not len(rig.allocator.pages_out())


def test_leaked_pages_of_every_group_are_found_and_reclaimed() -> None:
    rig = make(WINDOW, STATES)
    groups = rig.scheduler._running.kv_manager.groups
    assert groups is not None
    for pool in (1, 2):
        groups.allocator.alloc_in(pool, 1)
        with pytest.raises(RuntimeError, match="1 pages leaked"):
            rig.scheduler.check_integrity()
        assert rig.scheduler.repair_integrity() == ["1 leaked pages were reclaimed"]


def run_random_requests(seed: int) -> int:
    """Requests that repeat, extend and cut earlier ones, on a random scheduler. -> how many."""
    rng = random.Random(seed)
    size, window = rng.choice([1, 4, 16]), rng.choice([1, 3, 8, 20])
    pages, budget = 5 + rng.choice([64, 128, 512]) // size, rng.choice([3, 16, 64])
    further = []
    if seed % 3 != 1:
        minimum = -(-2 * window // size) + 4 + budget // size + (64 // size + 1 if seed % 3 else 0)
        further.append(PagePool("window", 1 + min(pages, minimum * rng.choice([1, 2, 4])), size, window))
    if seed % 3:
        further.append(PagePool("snapshot", 1 + rng.choice([1, 2, 4, 12]), 0))
    rig = make(
        *further, page_size=size, num_pages=pages, max_running=rng.choice([1, 3, 5]), token_budget=budget, max_context=60,
        overlap=rng.random() < 0.5, growth_reserve=rng.choice([0, 32]), min_shared_tokens=rng.choice([4, 256]),
    )  # fmt: skip
    known: list[list[int]] = []
    for _ in range(rng.randrange(3, 14)):
        tokens = [rng.randrange(40) for _ in range(rng.randrange(1, 45))]
        if known and rng.random() < 0.6:
            base = rng.choice(known)
            tokens = [*base[: rng.randrange(1, len(base) + 1)], *tokens[: rng.randrange(5)]][:50]
        rig.add(tokens, params(max_tokens=rng.choice([1, 4, 9])))
        known.append(tokens)
        for _ in range(rng.choice([0, 0, 3, 30])):
            rig.step()
        known += [[*found.message.token_ids, *found.got][:50] for found in rig.requests.values() if found.got]
        if rng.random() < 0.1:
            rig.abort(rng.choice(sorted(rig.requests)))
    rig.run()
    return len(rig.requests)


@pytest.mark.parametrize("seed", range(15))
def test_random_lengths(seed: int) -> None:
    run_random_requests(seed)


@pytest.mark.soak
def test_ten_thousand_random_lengths() -> None:
    done, seed = 0, 1000
    while done < 10_000:
        done, seed = done + run_random_requests(seed), seed + 1


def test_requests_that_arrive_together_share_a_window() -> None:
    rig = make(PagePool("window", 101, 4, 10), token_budget=64, min_shared_tokens=8)
    rids = [rig.add([*prompt(40), start, 1, 2], params(max_tokens=2)) for start in range(3)]
    finish(rig)
    assert [rig.requests[rid].cached for rid in rids] == [0, 40, 40]
    rig.check()


def hit_rate(*further: PagePool) -> float:
    """Cached share of the prompt tokens of conversations that begin with the same text."""
    rng = random.Random(1)
    rig = make(*further, page_size=16, num_pages=1200, max_running=6, token_budget=512, max_context=2000, overlap=True)
    talks, total, hits = [prompt(100) for _ in range(4)], 0, 0
    for _ in range(5):
        asked = []
        for talk in talks:
            talk += [rng.randrange(100) for _ in range(rng.randrange(10, 80))]
            asked.append(rig.add(talk, params(max_tokens=rng.randrange(80, 200))))
        finish(rig)
        for talk, rid in zip(talks, asked, strict=True):
            total, hits = total + len(talk), hits + (rig.requests[rid].cached or 0)
            talk += rig.requests[rid].got
    return hits / total


@pytest.mark.slow
def test_conversations_of_hybrid_models_hit_nearly_as_often() -> None:
    assert hit_rate(PagePool("window", 600, 16, 128), PagePool("snapshot", 25, 0)) >= 0.9 * hit_rate()


def test_load_and_outline_name_the_pages_of_every_group() -> None:
    rig = make(WINDOW, STATES, token_budget=16)
    cached(rig, prompt(38))
    window, states = rig.scheduler.get_load()["groups"]
    assert window == {"group": "window_10", "used_pages": 0, "total_pages": 40, "evictable_pages": 9}
    assert (states["group"], states["used_pages"], states["total_pages"], states["evictable_pages"]) == ("snapshot", 0, 8, 2)
    runs = rig.scheduler.outline_cache(9)["runs"]
    assert {name: sum(run["groups"][name] for run in runs) for name in runs[0]["groups"]} == {"window_10": 9, "snapshot": 2}


def test_a_short_request_takes_one_page_of_each_group() -> None:
    rig = make(PagePool("window", 9, 16, 128), PagePool("snapshot", 3, 0), page_size=16, num_pages=9)
    rig.add(prompt(12), params(max_tokens=3))
    rig.step()
    assert len(rig.allocator.pages_out()) == 3
    rig.run()


def test_a_sidecar_takes_no_pages_of_its_own() -> None:
    """Indexer keys are in the pages of their tokens."""
    kinds = ("tokens", "sidecar", "window", "sidecar", "snapshot")
    layers = [LayerCache(i, kind, (CacheTensor((8,)),), 10 if kind == "window" else None) for i, kind in enumerate(kinds)]
    geometry = group_layers(layers, 4, torch.float32)
    pools = plan_pools(geometry, Limits(4, 32, 100, 4), 256)
    assert [pool.kind for pool in pools] == ["window", "snapshot"]
    assert [geometry.groups[group.pool].kind for group in geometry.groups if group.kind == "sidecar"] == ["tokens"]
    rig = make(*pools)
    assert [cached(rig, prompt(16)), cached(rig, [*prompt(16), 5, 6])] == [0, 16]
    rig.scheduler.flush_cache()
    rig.add(prompt(3, 50), params(max_tokens=3))
    rig.step()
    assert len(rig.allocator.pages_out()) == 3
    rig.run()
