"""Tiers of two ranks that differ: what one rank lacks is computed, and stored anew."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.interfaces.kv_tier import KVTierResult
from frame.core.interfaces.sampling_params import SamplingParams
from frame.kv_tiers.ranked_tier import KeyTier
from tests.core.scheduling.small_rig import config, policy
from tests.kv_tiers.ranked_rig import RankedRig
from tests.kv_tiers.tier_rig import MemoryTier

PROMPT = list(range(17))  # four pages and a token


def make_rig(**more: Any) -> RankedRig:
    return RankedRig(config(num_pages=33, max_running=2, page_size=4, max_context=60, overlap=True), policy(), **more)


def ask(rig: RankedRig) -> int:
    """Ask the prompt with an empty device cache. -> the tokens that were loaded since the start."""
    rig.drop_device_cache()
    rid = rig.add(PROMPT, SamplingParams(max_tokens=2, temperature=0.0))
    rig.run_until(lambda: rig.requests[rid].finish is not None and not rig.controller.is_busy)
    return rig.load["tiers"][0]["loaded_tokens"]


@pytest.fixture(params=[False, True], ids=["copied", "in_memory"])
def rig(request: pytest.FixtureRequest) -> RankedRig:
    """A rig whose ranks have stored the prompt."""
    made = make_rig(in_memory=request.param)
    ask(made)
    assert list(made.tiers[0].blocks) == list(made.tiers[1].blocks)
    return made


def lose(tier: MemoryTier, place: int) -> None:
    del tier.blocks[list(tier.blocks)[place]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_that_one_rank_lacks_is_computed_and_stored_anew(rig: RankedRig, rank: int) -> None:
    lose(rig.tiers[rank], 2)
    loaded = ask(rig)
    assert loaded == 8, "the blocks before the one that is missing"
    assert rig.load["tier_failed_loads"] == rank, "rank 0 does not ask for blocks that it lacks itself"
    assert ask(rig) == loaded + 16
    assert rig.load["tier_failed_loads"] == rank


def test_a_first_block_that_the_other_rank_lacks(rig: RankedRig) -> None:
    lose(rig.tiers[1], 0)
    assert ask(rig) == 0
    assert ask(rig) == 16


def test_a_load_for_which_the_other_rank_has_no_room_is_tried_again(rig: RankedRig) -> None:
    rig.tiers[1].max_jobs = 0
    assert ask(rig) == 0
    rig.tiers[1].max_jobs = 10
    assert ask(rig) == 16


@pytest.mark.parametrize("failure", ["no room", "the disk is full"])
def test_a_store_that_fails_on_the_other_rank_is_not_matched(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    is_full = failure == "the disk is full"
    rig.tiers[1].max_jobs, rig.tiers[1].fails_store = 10 * is_full, is_full
    assert ask(rig) == 0
    assert rig.load["tiers"][0]["stored_tokens"] == 0
    assert "rank 1: " in caplog.text
    rig.tiers[1].max_jobs = 10
    assert ask(rig) == 0
    assert rig.load["tier_failed_loads"] == 0, "no load was begun"
    assert ask(rig) == 16


def test_pages_are_locked_until_all_ranks_have_copied_them() -> None:
    rig = make_rig()
    rig.add(PROMPT, SamplingParams(max_tokens=2, temperature=0.0))
    rig.twin_mover.is_held = True
    rig.run_until(lambda: bool(rig.twin_mover.stores))
    for _ in range(5):
        rig.step()
    assert not rig.mover.stores
    assert len(rig.controller.list_held_pages()[1]) == 4
    rig.run()
    assert not len(rig.controller.list_held_pages()[1])


def test_pages_are_in_transit_until_all_ranks_have_written_them(rig: RankedRig) -> None:
    rig.drop_device_cache()
    rig.twin_mover.is_held = True
    rid = rig.add(PROMPT, SamplingParams(max_tokens=2, temperature=0.0))
    rig.run_until(lambda: bool(rig.twin_mover.loads))
    for _ in range(5):
        rig.step()
    assert len(rig.controller.list_held_pages()[0]) == 4
    rig.abort(rid)
    rig.step()
    assert len(rig.controller.list_held_pages()[0]) == 4, "the other rank still writes"
    rig.run()


def test_replies_that_come_too_late_are_ignored(rig: RankedRig) -> None:
    rig.drop_device_cache()
    rig.link.is_held = True
    rid = rig.add(PROMPT, SamplingParams(max_tokens=2, temperature=0.0))
    rig.run_until(lambda: rig.load["tier_waiting"] == 1)
    rig.now += 60
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    rig.release()
    rig.run_until(lambda: not rig.controller.is_busy)
    assert ask(rig) >= 16
    rig.run()


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def store(tier: KeyTier, job: int, *numbers: int, commit: bool = True) -> list[KVTierResult]:
    buffers = tier.store(job, keys(*numbers))
    assert buffers is not None
    assert len(buffers) == len(numbers)
    tier.finish(job, commit=commit)
    return tier.poll()


def test_keys_stand_for_the_blocks_of_another_group() -> None:
    tier = KeyTier(4, max_match=3)
    assert store(tier, 1, 1, 2, 3) == [KVTierResult(1, 3)]
    assert store(tier, 2, 9, commit=False) == []
    assert [tier.match(keys(*numbers)) for numbers in ((1, 2, 3), (1, 2, 4), (9,), (2,))] == [3, 2, 0, 1]
    store(tier, 3, 4, 5)
    assert [tier.match(keys(number)) for number in range(1, 6)] == [1, 1, 0, 1, 1], "3 is the least recently used"
    assert tier.load(4, keys(1, 2)) is not None
    assert tier.poll() == [KVTierResult(4, 2)]
    store(tier, 5, 6)
    assert [tier.match(keys(number)) for number in range(1, 7)] == [1, 1, 0, 1, 0, 1]
    assert tier.match(keys(1, 2, 4, 6)) == 3, "as many as a load has buffers for"


def test_groups_read_the_blocks_of_each_other_where_the_place_is_shared() -> None:
    shared = MemoryTier(8)
    tier = KeyTier(4, 10, shared)
    shared.blocks.update(dict.fromkeys(keys(1, 2, 3)))  # type: ignore[arg-type]
    store(tier, 1, 1)
    assert tier.match(keys(1, 2, 3, 4)) == 3
