"""Loads and stores of the tier controller, through a scheduler with a fake tier and mover."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Heartbeat, SessionPin
from frame.core.scheduling.request import Request
from frame.kv_tiers.loads import DEADLINE_MARGIN
from frame.kv_tiers.stores import MAX_SEEN
from frame.parallel.replica_choice import sum_loads
from tests.kv_tiers.tier_rig import PARAMS, PROMPT, MemoryTier, TierRig, make_rig


def cached_of(rig: TierRig, rid: str) -> int | None:
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    return rig.requests[rid].cached


def count_loads(rig: TierRig) -> int:
    return sum(tier.num_loads for tier in rig.tiers)


def test_prompt_is_read_back_and_counts_as_cached() -> None:
    rig = make_rig()
    assert rig.load["tiers"][0]["stored_tokens"] == 24
    rid = rig.add([*PROMPT, 1, 2], PARAMS)
    assert cached_of(rig, rid) == 24
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert rig.load["tiers"] == [{"tier": "tier0", "loaded_tokens": 24, "stored_tokens": 28}]
    rig.run()


def test_whole_prompt_may_be_loaded() -> None:
    rig = make_rig()
    assert cached_of(rig, rig.add(PROMPT, PARAMS)) == 23  # the last token's logits are computed
    rig.run()


def test_load_begins_where_the_device_cache_ends() -> None:
    rig = make_rig()
    rig.add(PROMPT[:8], SamplingParams(max_tokens=1, temperature=0.0))
    rig.run_until(lambda: rig.scheduler.is_idle)
    before = rig.load["tiers"][0]["loaded_tokens"]
    assert cached_of(rig, rig.add([*PROMPT, 1], PARAMS)) == 24
    assert rig.load["tiers"][0]["loaded_tokens"] - before == 16
    rig.run()


def test_requests_share_a_load_and_others_go_on() -> None:
    rig = make_rig()
    rig.tiers[0].is_held = True
    waiting = [rig.add([*PROMPT, number], PARAMS) for number in range(3)]
    other = rig.add([9, 8, 7], PARAMS)
    rig.run_until(lambda: rig.requests[other].finish is not None)
    assert not any(rig.requests[rid].got for rid in waiting)
    assert rig.load["tier_waiting"] == 3 == rig.scheduler.outline_requests(10)["phases"]["tier"]
    rig.release()
    assert [cached_of(rig, rid) for rid in waiting] == [24, 24, 24]
    assert count_loads(rig) == 1
    rig.run()


def test_shared_load_is_abandoned_with_its_last_request() -> None:
    rig = make_rig()
    rig.tiers[0].is_held = True
    first, second = rig.add([*PROMPT, 1], PARAMS), rig.add([*PROMPT, 2], PARAMS)
    rig.step()
    rig.abort(first)
    assert rig.load["tier_waiting"] == 1
    assert rig.tiers[0].loads
    rig.abort(second)
    assert not rig.tiers[0].loads
    rig.check_empty()
    rig.run()


def test_load_after_its_deadline_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    rig.tiers[0].is_held = True
    rid = rig.add([*PROMPT, 1], PARAMS)
    rig.step()
    rig.now += 0.9 * DEADLINE_MARGIN
    rig.step()
    assert rig.load["tier_waiting"] == 1
    rig.now += 1.0
    assert cached_of(rig, rid) == 0
    assert (rig.load["tier_late_loads"], rig.load["tier_failed_loads"]) == (1, 0)
    assert "blocks of the KV cache tier tier0 are computed: it has not read a prefix before the deadline" in caplog.text
    assert not rig.tiers[0].loads  # abandoned, and its pages are free
    assert not len(rig.controller.list_held_pages()[0])
    rig.run()


def test_pages_of_a_late_copy_are_kept_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    rig.mover.is_held = True
    rid = rig.add([*PROMPT, 1], PARAMS)
    rig.run_until(lambda: bool(rig.mover.loads))
    rig.now += 2.0
    assert cached_of(rig, rid) == 0
    assert rig.load["tier_late_loads"] == 1
    assert "a prefix was not copied to the device before the deadline" in caplog.text
    assert len(rig.controller.list_held_pages()[0]) == 6
    rig.scheduler.check_integrity()
    rig.run()


@pytest.mark.parametrize("count", [0, 2])
def test_request_computes_what_a_load_lacks(count: int) -> None:
    rig = make_rig()
    rig.tiers[0].num_read = count
    assert cached_of(rig, rig.add([*PROMPT, 1], PARAMS)) == 4 * count
    assert rig.load["tier_failed_loads"] == 1
    assert count_loads(rig) == 1  # it is not tried again
    rig.run()


def test_next_tier_gives_the_rest() -> None:
    rig = make_rig(sizes=(100, 100))
    near, far = rig.tiers
    for key in list(near.blocks)[2:]:
        del near.blocks[key]
    rid = rig.add([*PROMPT, 1], PARAMS)
    assert cached_of(rig, rid) == 24
    assert [tier["loaded_tokens"] for tier in rig.load["tiers"]] == [8, 16]
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert len(near.blocks) == len(far.blocks)  # loaded blocks go to the nearer tier
    rig.run()


def test_short_segment_ends_the_load() -> None:
    rig = make_rig(sizes=(100, 100))
    for key in list(rig.tiers[0].blocks)[3:]:
        del rig.tiers[0].blocks[key]
    rig.tiers[0].num_read = 1
    assert cached_of(rig, rig.add([*PROMPT, 1], PARAMS)) == 4
    rig.run()


@pytest.mark.parametrize(("minimum", "expected"), [(24, 24), (25, 0)])
def test_break_even_length(minimum: int, expected: int) -> None:
    rig = make_rig(min_load_tokens=minimum)
    assert cached_of(rig, rig.add([*PROMPT, 1], PARAMS)) == expected
    assert count_loads(rig) == bool(expected)
    rig.run()


def test_tier_without_buffers_is_not_waited_for() -> None:
    rig = make_rig()
    rig.tiers[0].max_jobs = 0
    assert cached_of(rig, rig.add([*PROMPT, *range(9)], PARAMS)) == 0
    assert rig.load["tier_dropped_blocks"] > 0
    assert rig.load["tier_waiting"] == 0
    rig.run()


def test_loads_in_transit_are_bounded() -> None:
    """The second request waits for room; the third one's prompt needs two loads."""
    prompts = [[number, *range(50, 73)] for number in (1, 2)] + [list(range(44))]
    rig = make_rig([*prompts, prompts[2]], num_pages=65)
    rig.controller._set.max_pages = 8
    rids = [rig.add([*prompt, 9], PARAMS) for prompt in prompts]
    rig.mover.is_held = True
    for _ in range(4):
        rig.step()
    assert len(rig.controller.list_held_pages()[0]) == 8  # 6 of the first, and 2 of the second
    rig.release()
    assert [cached_of(rig, rid) for rid in rids] == [24, 24, 44]
    assert count_loads(rig) >= 5
    rig.run()


def test_no_pages_for_a_load() -> None:
    rig = make_rig(num_pages=17)
    kv_manager = rig.scheduler._running.kv_manager
    taken = kv_manager.allocate_pages(16)
    request = Request("late", np.array([*PROMPT, 1], np.int32), PARAMS, 0, 0, 0.0, 9.0, 99)
    assert rig.controller.may_start(request)
    assert not count_loads(rig)
    rig.controller.forget(request)
    assert taken is not None
    kv_manager.allocator.free(taken)
    rig.run()


def test_prompt_logprobs_are_not_loaded() -> None:
    rig = make_rig()
    rid = rig.add([*PROMPT, 1], SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1))
    assert cached_of(rig, rid) == 0
    assert not count_loads(rig)
    rig.run()


def test_preempted_request_is_loaded() -> None:
    rig = make_rig((), max_running=2)
    rig.add([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    rid = rig.add(PROMPT, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    rig.run_until(lambda: len(rig.requests[rid].got) > 8)
    planner = rig.scheduler._planner
    planner.preempt(planner._running.requests[-1])
    while rig.controller.is_busy:
        rig.scheduler.poll_tiers(rig.now)
    rig.drop_device_cache()
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    assert rig.load["preempted"] == 1
    assert rig.load["tiers"][0]["loaded_tokens"] == 32
    rig.run()


def test_namespaces_are_apart() -> None:
    rig = make_rig()
    rid = rig.add([*PROMPT, 1], PARAMS, namespace="tenant:")
    assert cached_of(rig, rid) == 0
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert not count_loads(rig)
    rig.drop_device_cache()
    assert cached_of(rig, rig.add([*PROMPT, 2], PARAMS, namespace="tenant:")) == 24
    rig.run()


def test_flush_makes_stored_blocks_unreachable() -> None:
    rig = make_rig()
    rig.scheduler.flush_cache()
    assert cached_of(rig, rig.add([*PROMPT, 1], PARAMS)) == 0
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert not count_loads(rig)
    rig.drop_device_cache()
    assert cached_of(rig, rig.add([*PROMPT, 2], PARAMS)) == 24  # stored again under new keys
    rig.run()


def test_flush_abandons_loads_and_waits_for_copies() -> None:
    rig = make_rig()
    rig.tiers[0].is_held = True
    reading = rig.add([*PROMPT, 1], PARAMS)
    rig.step()
    rig.scheduler.flush_cache()
    assert not rig.tiers[0].loads
    assert cached_of(rig, reading) == 0
    assert rig.mover.stores or rig.controller.is_busy
    rig.scheduler.flush_cache()
    assert not rig.mover.stores
    rig.scheduler.check_integrity()
    assert not len(rig.allocator.pages_out())
    rig.run()


def test_flush_names_copies_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.kv_tiers.controller.COPY_TIMEOUT", 0.01)
    rig = make_rig(())
    rig.mover.is_held = True
    rig.add(PROMPT, PARAMS)
    rig.run_until(lambda: bool(rig.mover.stores))
    with pytest.raises(RuntimeError, match="copies to the KV cache tiers have not ended"):
        rig.scheduler.flush_cache()
    rig.run()


def test_selective_policy_stores_at_the_second_offer() -> None:
    rig = make_rig(write_policy="write_through_selective")
    assert not rig.tiers[0].blocks  # its prompt and its release are one offer
    rig.add([*PROMPT, 1, 2, 3, 4], PARAMS)
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert len(rig.tiers[0].blocks) == 6  # not the block that was new
    assert 6 < len(rig.controller._stores._seen) <= MAX_SEEN
    rig.run()


def test_process_keys_go_to_local_tiers_only() -> None:
    """Blocks at and after a negative cache key are neither stored in nor read from a tier that
    other processes read."""
    rig = make_rig((), sizes=(100, 100), is_local=(True, False))
    request = Request("media", np.array(PROMPT, np.int32), PARAMS, 0, 0, 0.0, 9.0, 99)
    request.prompt_keys = np.array([*PROMPT[:9], *[-5] * 15], np.int32)
    kv_manager = rig.scheduler._running.kv_manager
    pages = kv_manager.allocate_pages(6)
    assert pages is not None
    rig.runner._token[pages] = request.prompt_keys.reshape(6, 4)
    kv_manager.cache.insert(request.prompt_keys, pages)
    rig.controller.offer(request, request.prompt_keys)
    rig.run_until(lambda: rig.scheduler.is_idle)
    near, far = rig.tiers
    assert (len(near.blocks), len(far.blocks)) == (6, 2)
    far.blocks = near.blocks.copy()
    near.blocks.clear()
    rig.drop_device_cache()
    assert not rig.controller.may_start(request)
    rig.run_until(lambda: not rig.controller.is_busy)
    assert [tier["loaded_tokens"] for tier in rig.load["tiers"]] == [0, 8]
    rig.controller.forget(request)
    rig.run()


def test_stores_lock_a_bounded_part_of_the_pool() -> None:
    rig = make_rig((), max_running=8, num_pages=65)
    rig.controller._set.max_pages = 8
    rig.mover.is_held = True
    for number in range(4):
        rig.add([number, *range(50, 65)], PARAMS)
    rig.run_until(lambda: not rig.scheduler.num_requests)
    assert 0 < len(rig.controller.list_held_pages()[1]) <= 8
    assert rig.load["tier_dropped_blocks"] > 0
    rig.run()


def test_long_prefix_is_stored_in_pieces() -> None:
    """A prefix of more pages than stores may lock together is locked alone. Its rest is stored when
    the request ends."""
    rig = make_rig((), num_pages=65)
    rig.controller._set.max_pages = 8
    rid = rig.add(list(range(60)), PARAMS)
    rig.run_until(lambda: bool(rig.tiers[0].blocks))
    assert len(rig.tiers[0].blocks) == 8
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert len(rig.tiers[0].blocks) == 15
    rig.run()


def test_failed_store_keeps_nothing() -> None:
    rig = make_rig(())
    rig.tiers[0].fails_store = True
    rig.add(PROMPT, PARAMS)
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert rig.load["tiers"][0]["stored_tokens"] == len(rig.tiers[0].blocks) * 4 < 24
    rig.run()


def test_idle_scheduler_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()

    def refuse(tier: MemoryTier) -> None:
        raise AssertionError("a tier is polled although nothing is under way")

    monkeypatch.setattr(MemoryTier, "poll", refuse)
    rig.scheduler.poll_tiers(rig.now)
    assert rig.scheduler.schedule_batch(rig.now) is None


def test_repair_keeps_the_locks_of_copies() -> None:
    rig = make_rig(())
    rig.mover.is_held = True
    rig.add(PROMPT, PARAMS)
    rig.run_until(lambda: not rig.scheduler.num_requests)
    cache = rig.scheduler._running.kv_manager.cache
    cache.lock(cache.match(np.array(PROMPT, np.int32)).handle)
    cache.lock(cache.match(np.array(PROMPT, np.int32)).handle)
    locked = cache.num_locked
    assert rig.scheduler.repair_integrity() == []  # the same pages are locked
    rig.scheduler._running.kv_manager.allocate_pages(2)
    assert rig.scheduler.repair_integrity() == ["2 leaked pages were reclaimed"]
    assert cache.num_locked == locked
    cache.unlock(cache.match(np.array(PROMPT, np.int32)).handle)
    cache.unlock(cache.match(np.array(PROMPT, np.int32)).handle)
    rig.run()


def test_load_is_told_by_heartbeats_and_summed() -> None:
    rig = make_rig()
    load = rig.load
    assert Heartbeat(process="engine", **load).tiers == [{"tier": "tier0", "loaded_tokens": 0, "stored_tokens": 24}]
    total = sum_loads([load, load])
    assert total["tiers"] == [{"tier": "tier0", "loaded_tokens": 0, "stored_tokens": 48}]
    assert total["tier_dropped_blocks"] == 2 * load["tier_dropped_blocks"]


def test_close_ends_tiers_and_mover_although_one_fails() -> None:
    rig = make_rig((), sizes=(10, 10))

    def fail() -> None:
        rig.mover.is_closed = True
        raise RuntimeError("the device is lost")

    rig.mover.close = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        rig.scheduler.close()
    assert rig.mover.is_closed
    assert all(tier.is_closed for tier in rig.tiers)


def test_prefill_rate_is_measured() -> None:
    rig = make_rig((), num_pages=129, max_context=300)
    before = rig.controller._loads.prefill_rate
    rig.add(list(range(80)), PARAMS)
    for _ in range(8):
        rig.step()
        rig.now += 1.0
    assert rig.controller._loads.prefill_rate < before
    rig.run()


def test_usage_tells_which_tier_the_tokens_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, told = make_rig(sizes=(3, 1000)), list[dict[str, int]]()
    receive = rig._receive
    monkeypatch.setattr(rig, "_receive", lambda tokens: (told.extend(tokens.cached_tiers.values() if tokens else ()), receive(tokens)))
    rig.add([*PROMPT, 1, 2], PARAMS)
    rig.run_until(lambda: rig.scheduler.is_idle)
    rig.add([*PROMPT, 1, 2], PARAMS)
    rig.run()
    assert len(told) == 1, "the second request has all from the device"
    assert sum(told[0].values()) == 24
    assert told[0]["tier1"] >= 12


def test_a_session_is_stored_at_its_first_offer() -> None:
    rig = make_rig((), write_policy="write_through_selective", max_pinned_pages=8)
    rig.add(PROMPT, PARAMS)
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert not rig.tiers[0].blocks
    rig.add([7, *PROMPT], PARAMS, pin=SessionPin("", "session", 60.0))
    rig.run_until(lambda: rig.scheduler.is_idle)
    assert len(rig.tiers[0].blocks) == 6
    rig.drop_device_cache()
    assert cached_of(rig, rig.add([7, *PROMPT, 1], PARAMS)) == 24
    rig.run()
