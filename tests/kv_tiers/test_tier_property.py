"""Property test of loads and stores: random requests, aborts, slow and failed jobs, evictions and
flushes over tiny pools and tiers, and sessions. The rig checks the accounts and the tokens of pages
in each step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import SessionPin
from frame.kv_tiers.tier_set import WritePolicy
from tests.core.scheduling.small_rig import config, policy
from tests.kv_tiers.ranked_rig import RankedRig
from tests.kv_tiers.tier_rig import TierRig

VOCAB = 40


class TierMachine(RuleBasedStateMachine):
    rig_class: type[TierRig] = TierRig

    @initialize(
        page_size=st.sampled_from([1, 4]),
        pool=st.sampled_from([48, 96, 192]),
        slots=st.integers(1, 4),
        budget=st.sampled_from([3, 16, 64]),
        overlap=st.booleans(),
        name=st.sampled_from(["fcfs", "lpm", "priority"]),
        sizes=st.sampled_from([(4,), (200,), (6, 200), (200, 12)]),
        min_load_tokens=st.sampled_from([1, 5]),
        write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        in_memory=st.booleans(),
        max_jobs=st.sampled_from([1, 3, 100]),
    )
    def start(
        self,
        page_size: int,
        pool: int,
        slots: int,
        budget: int,
        overlap: bool,
        name: str,
        sizes: tuple[int, ...],
        min_load_tokens: int,
        write_policy: WritePolicy,
        in_memory: bool,
        max_jobs: int,
    ) -> None:
        limits = config(
            page_size=page_size,
            num_pages=1 + pool // page_size,
            max_running=slots,
            token_budget=budget,
            max_context=30,
            vocab_size=VOCAB,
            eos_ids=(5,),
            overlap=overlap,
            min_shared_tokens=4,
            max_pinned_pages=pool // page_size // 3,
        )
        self.rig = self.rig_class(
            limits, policy(name), sizes=sizes, min_load_tokens=min_load_tokens, write_policy=write_policy, in_memory=in_memory
        )
        for tier in self.rig.tiers:
            tier.max_jobs = max_jobs

    @rule(
        stem=st.integers(0, 2),
        stem_len=st.integers(0, 20),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 6),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        priority=st.integers(0, 2),
        namespace=st.sampled_from(["", "", "tenant:"]),
        deadline=st.none() | st.integers(1, 10),
        session=st.sampled_from([None, None, "a", "b", "c"]),
        again=st.booleans(),
    )
    def add(
        self,
        stem: int,
        stem_len: int,
        tail: list[int],
        max_tokens: int,
        prompt_logprobs: int | None,
        priority: int,
        namespace: str,
        deadline: int | None,
        session: str | None,
        again: bool,
    ) -> None:
        tokens = [(stem * 11 + i) % VOCAB for i in range(stem_len)] + tail
        if again and self.rig.requests:
            earlier = self.rig.requests[max(self.rig.requests)]
            tokens = [*earlier.message.token_ids, *earlier.got][:24]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, prompt_logprobs=prompt_logprobs)
        pin = None if session is None else SessionPin(namespace, session, 4.0)
        self.rig.add(tokens, params, priority, namespace, None if deadline is None else float(deadline), pin=pin)

    @rule(count=st.integers(1, 6), seconds=st.sampled_from([0.01, 0.5]))
    def step(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.rig.step()
            self.rig.now += seconds

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.requests))))
        self.rig.scheduler.check_integrity()

    @rule(tier=st.integers(0, 3), held=st.booleans())
    def hold_tier(self, tier: int, held: bool) -> None:
        self.rig.tiers[tier % len(self.rig.tiers)].is_held = held

    @rule(held=st.booleans())
    def hold_mover(self, held: bool) -> None:
        self.rig.mover.is_held = held

    @rule(tier=st.integers(0, 3), count=st.integers(0, 3), stores=st.booleans())
    def fail(self, tier: int, count: int, stores: bool) -> None:
        chosen = self.rig.tiers[tier % len(self.rig.tiers)]
        chosen.num_read, chosen.fails_store = count, stores

    @rule(tier=st.integers(0, 3), place=st.integers(0, 50))
    def lose_block(self, tier: int, place: int) -> None:
        blocks = self.rig.tiers[tier % len(self.rig.tiers)].blocks
        if blocks:
            del blocks[list(blocks)[place % len(blocks)]]

    @rule()
    def drop_device_cache(self) -> None:
        self.rig.drop_device_cache()
        self.rig.scheduler.check_integrity()

    @rule()
    def flush(self) -> None:
        """What the tiers hold is stale afterwards: a load of it would be a wrong token."""
        self.rig.release()
        self.rig.scheduler.flush_cache()
        self.rig.scheduler.check_integrity()
        for tier in self.rig.tiers:
            buffers = [buffer for _, row in tier.stores.values() for buffer in row if buffer is not None]
            for block in (*tier.blocks.values(), *buffers):
                block.fill_(1)

    @precondition(lambda self: len(self.rig.scheduler._running) > 1)
    @rule()
    def preempt(self) -> None:
        planner = self.rig.scheduler._planner
        planner.preempt(planner._running.requests[-1])

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.run(max_steps=3000)  # no page, slot, job or lock is left
            assert self.rig.load["pins"] == self.rig.load["pinned_pages"] == 0


class RankedMachine(TierMachine):
    """Two ranks, whose tiers lose, refuse and hold blocks each on its own."""

    rig_class = RankedRig

    @rule(held=st.booleans())
    def hold_replies(self, held: bool) -> None:
        assert isinstance(self.rig, RankedRig)
        self.rig.link.is_held = held

    @rule(held=st.booleans())
    def hold_follower(self, held: bool) -> None:
        assert isinstance(self.rig, RankedRig)
        self.rig.twin_mover.is_held = held


TierMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestTiers = TierMachine.TestCase
RankedMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestRankedTiers = RankedMachine.TestCase


@pytest.mark.pairwise
@pytest.mark.parametrize("rig_class", [TierRig, RankedRig])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("write_policy", "in_memory"), [("write_through", True), ("write_through_selective", False), ("write_back", False)]
)
def test_conversations_are_read_back(rig_class: type[TierRig], overlap: bool, write_policy: WritePolicy, in_memory: bool) -> None:
    """Conversations whose prefixes exceed the pool: all turns are read from a tier or the
    device."""
    limits = config(num_pages=49, max_running=2, max_context=120, overlap=overlap)
    rig = rig_class(limits, policy(), sizes=(20, 1000), write_policy=write_policy, in_memory=in_memory)
    texts = {number: [number, *range(12)] for number in range(6)}
    for _ in range(6):
        for number, text in texts.items():
            rid = rig.add(text, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            rig.run_until(lambda rid=rid: rig.requests[rid].finish is not None)
            texts[number] = [*text, *rig.requests[rid].got, 50 + number]
    rig.run()
    assert rig.load["tiers"][0]["stored_tokens"] > 0
    # `write_back` drops what a prompt of a third of the pool needs at once
    assert rig.load["tiers"][1]["loaded_tokens"] > (0 if write_policy == "write_back" else 100)
    assert rig.load["tier_failed_loads"] == 0
