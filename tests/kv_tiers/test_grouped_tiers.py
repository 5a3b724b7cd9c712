"""Loads and stores of models with windows and recurrent states, over the fake runner that reads
both back: a wrong window, or a state of another position, is an error or a wrong token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from frame.core.interfaces.cache_groups import PagePool
from frame.core.interfaces.sampling_params import SamplingParams
from tests.core.scheduling.small_rig import config, policy
from tests.kv_tiers.grouped_tier_rig import GroupedTierRig
from tests.kv_tiers.test_tier_property import VOCAB, TierMachine

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def make_pools(page_size: int, pool: int, window: int | None, states: int) -> list[PagePool]:
    further = []
    if window is not None:
        further.append(PagePool("window", 1 + (2 * window + pool // 2) // page_size + 4, page_size, window))
    if states:
        further.append(PagePool("snapshot", 1 + states, 0))
    return further


class GroupedTierMachine(TierMachine):
    @initialize(
        shape=st.sampled_from([(1, 48), (1, 96), (4, 48), (4, 192)]),
        slots=st.integers(1, 4),
        budget=st.sampled_from([3, 16, 64]),
        overlap=st.booleans(),
        sizes=st.sampled_from([(24,), (400,), (40, 400), (400, 60)]),
        groups=st.sampled_from([(5, 0), (9, 0), (None, 4), (None, 9), (6, 6)]),
        selective=st.booleans(),
        in_memory=st.booleans(),
        max_jobs=st.sampled_from([1, 3, 100]),
    )
    def start(  # type: ignore[override]
        self,
        shape: tuple[int, int],
        slots: int,
        budget: int,
        overlap: bool,
        sizes: tuple[int, ...],
        groups: tuple[int | None, int],
        selective: bool,
        in_memory: bool,
        max_jobs: int,
    ) -> None:
        page_size, pool = shape
        window, states = groups
        changes: dict[str, Any] = {"max_running": slots, "token_budget": budget, "max_context": 30, "vocab_size": VOCAB}
        changes["max_pinned_pages"] = pool // page_size // 3
        limits = config(page_size=page_size, num_pages=1 + pool // page_size, overlap=overlap, min_shared_tokens=4, eos_ids=(5,), **changes)
        further = make_pools(page_size, pool, window, states)
        self.rig = GroupedTierRig(
            limits,
            policy(),
            sizes=sizes,
            write_policy="write_through_selective" if selective else "write_through",
            in_memory=in_memory,
            further=further,
        )
        for tier in self.rig.tiers:
            tier.max_jobs = max_jobs


GroupedTierMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestGroupedTiers = GroupedTierMachine.TestCase


@pytest.mark.parametrize("groups", [(6, 0), (None, 6), (6, 6)], ids=["window", "states", "both"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_conversations_are_read_back(groups: tuple[int | None, int], page_size: int) -> None:
    """After each turn the device's cache is dropped: the next turn reads from the tiers what the
    device would have served."""
    rigs, cached = [], []
    for drops in (False, True):
        limits = config(num_pages=1 + 800 // page_size, page_size=page_size, token_budget=8, max_context=160)
        further = make_pools(page_size, 400, groups[0], 10 * groups[1])
        rig = GroupedTierRig(limits, policy(), sizes=(60, 2000) if drops else (1,), further=further)
        text, counts = list(range(21)), []
        for turn in range(5):
            rid = rig.add(text, GREEDY)
            rig.run_until(lambda rid=rid, rig=rig: rig.requests[rid].finish is not None and not rig.controller.is_busy)
            counts.append(rig.requests[rid].cached)
            text = [*text, *rig.requests[rid].got, *(30 + turn + i for i in range(9))]
            if drops:
                rig.drop_device_cache()
        rig.run()
        rigs.append(rig)
        cached.append(counts)
    assert rigs[1].load["tier_failed_loads"] == 0
    assert cached[0][0] == 0
    assert all(cached[0][1:])
    if groups[1]:  # a chunk of a prompt ends elsewhere where the device has tokens without a state
        assert all(abs(ours - theirs) <= 8 for ours, theirs in zip(cached[1], cached[0], strict=True))
    else:
        assert cached[1] == cached[0]


def test_a_state_that_a_tier_has_lost_is_computed() -> None:
    """All groups or none: without the state no block of the match is used."""
    rig = GroupedTierRig(config(token_budget=8, page_size=4), policy(), further=make_pools(4, 400, None, 9))
    cached, text = [], list(range(30))
    for _ in range(3):
        rid = rig.add(text, GREEDY)
        rig.run_until(lambda rid=rid: rig.requests[rid].finish is not None and not rig.controller.is_busy)
        cached.append(rig.requests[rid].cached)
        rig.drop_device_cache()
        if len(cached) == 2:
            pieces = [key for key, block in rig.tiers[0].blocks.items() if not block[2:].any()]  # a state has 2 bytes in each
            for key in pieces:
                del rig.tiers[0].blocks[key]
    assert cached[0] == cached[2] == 0
    assert cached[1] == 24
    rig.run()


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_load_that_lacks_the_state_is_not_used(in_memory: bool) -> None:
    """The tier reads the tokens and fails at the first piece of the state."""
    rig = GroupedTierRig(config(token_budget=8, page_size=4), policy(), further=make_pools(4, 400, None, 9), in_memory=in_memory)
    text = list(range(30))
    for num_read in (None, 6, 8, None):
        rid = rig.add(text, GREEDY)
        rig.tiers[0].num_read = num_read
        rig.run_until(lambda rid=rid: rig.requests[rid].finish is not None and not rig.controller.is_busy)
        assert rig.requests[rid].cached == (24 if num_read is None and rid != "request-0" else 0)
        rig.drop_device_cache()
    assert rig.load["tier_failed_loads"] == 2
    rig.run()


def test_a_state_is_locked_while_it_is_copied() -> None:
    """Other requests need all states meanwhile."""
    rig = GroupedTierRig(config(token_budget=8, page_size=4, max_running=1), policy(), further=make_pools(4, 400, None, 5))
    rig.mover.is_held = True
    texts = [[number, *range(30)] for number in range(5)]
    for text in texts:
        rid = rig.add(text, GREEDY)
        rig.run_until(lambda rid=rid: rig.requests[rid].finish is not None)
        assert rig.controller.is_busy
    rig.mover.is_held = False
    rig.run_until(lambda: not rig.controller.is_busy)
    rig.drop_device_cache()
    rids = [rig.add(text, GREEDY) for text in texts]
    rig.run()
    assert rig.requests[rids[0]].cached


@pytest.mark.parametrize("overlap", [False, True])
def test_a_load_does_not_write_over_a_state_that_the_same_step_copies(overlap: bool) -> None:
    """One request holds a state and another begins with a copy of the cached one, which the load of
    a third evicts before the step is launched."""
    limits = config(token_budget=24, page_size=4, max_running=3, overlap=overlap)
    rig = GroupedTierRig(limits, policy(), further=make_pools(4, 400, None, 3), in_memory=True)
    texts = [[number, *range(24)] for number in range(2)]
    for text in (*texts, None, texts[0]):
        if text is None:
            rig.drop_device_cache()
        else:
            rid = rig.add(text, GREEDY)
            rig.run_until(lambda rid=rid: rig.requests[rid].finish is not None and not rig.controller.is_busy)
    holder = rig.add([7], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    rig.run_until(lambda: len(rig.requests[holder].got) > 2)
    rids = [rig.add(text, GREEDY) for text in texts]
    rig.run()
    assert [rig.requests[rid].cached for rid in rids] == [24, 24]
