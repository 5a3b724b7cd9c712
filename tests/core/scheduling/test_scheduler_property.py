"""Property test of the scheduler: random adds, aborts, preemptions, steps and late commits, with
tiny pools, all policies, and overlap on and off.

The rig checks after each step that no request waits although there is room for it. The fake
runner's tokens are hashes of what it reads back through the page table, so a fault with a page, a
slot, a cached prefix or a preempted request shows as a wrong token or a refused step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.cache_groups import PagePool
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.plugins.loader import load_registry
from frame.structured_output import grammar_masks, grammar_threads
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.fake_runner import continuation
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.grouped_rig import GroupedRig
from tests.core.scheduling.rig_machine import RigMachine
from tests.core.scheduling.scripted_grammar import Script

REGISTRY = load_registry(installed=False)
SCHEDULING_POLICIES = {record.name: REGISTRY.load(record) for record in REGISTRY.records("scheduling_policy")}
EVICTION_POLICIES = {record.name: REGISTRY.load(record) for record in REGISTRY.records("eviction_policy")}
VOCAB = 40
EOS = 5


def is_invalid(tokens: list[int]) -> bool:
    """A rare prefix whose logits are not finite."""
    return len(tokens) > 8 and tokens[-1] == 7 and tokens[-2] % 4 == 0


def right_draft(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    """What the fake runner will draw."""
    return continuation(tokens, setup.params, setup.seed, VOCAB, maximum)


def wrong_draft(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    return [(token + 1) % VOCAB for token in right_draft(setup, tokens, maximum)]


def mixed_draft(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    """Of varying length, right up to a varying place."""
    draft = right_draft(setup, tokens, maximum)[: len(tokens) % (maximum + 1)]
    return [token if i < tokens[-1] % 4 else (token + 1) % VOCAB for i, token in enumerate(draft)]


@pytest.fixture(autouse=True)
def quick_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy, too, each step waits for the masks of its grammars: a request that
    is held for one would seem to wait without a cause."""
    monkeypatch.setattr(grammar_threads, "QUICK_SECONDS", 60.0)
    monkeypatch.setattr(grammar_masks, "SLOW_SECONDS", math.inf)
    monkeypatch.setattr(grammar_masks, "CROWDED_SECONDS", math.inf)


SCRIPTS = {"right": right_draft, "wrong": wrong_draft, "mixed": mixed_draft}


class SchedulerMachine(RigMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        slots=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 16, 64]),
        pool=st.sampled_from([32, 48, 96]),
        overlap=st.booleans(),
        policy=st.sampled_from(sorted(SCHEDULING_POLICIES)),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
        prefix_cache=st.booleans(),
        invalid=st.booleans(),
        growth_reserve=st.sampled_from([0, 32]),
        share=st.sampled_from([0.0, 0.5, 0.9]),
        preemption=st.booleans(),
        jump_forward=st.sampled_from([0, 2, 2, 4]),
        min_shared_tokens=st.sampled_from([2, 4, 256]),
        drafts=st.sampled_from(["none", "right", "wrong", "mixed"]),
        num_steps=st.integers(1, 5),
        window=st.sampled_from([None, None, 1, 9]),
        states=st.sampled_from([0, 0, 1, 4]),
    )
    def start(
        self,
        page_size: int,
        slots: int,
        budget: int,
        pool: int,
        overlap: bool,
        policy: str,
        eviction: str,
        prefix_cache: bool,
        invalid: bool,
        growth_reserve: int,
        share: float,
        preemption: bool,
        jump_forward: int,
        min_shared_tokens: int,
        drafts: str,
        num_steps: int,
        window: int | None,
        states: int,
    ) -> None:
        further = []
        if window is not None:
            further.append(PagePool("window", 1 + (2 * window + pool // 2) // page_size + 4, page_size, window))
        if states:
            further.append(PagePool("snapshot", 1 + states, 0))
        config = SchedulerConfig(
            page_size=page_size,
            num_pages=1 + pool // page_size,
            max_running=slots,
            token_budget=budget,
            max_context=30,
            vocab_size=VOCAB,
            eos_ids=(EOS,),
            overlap=overlap,
            growth_reserve=growth_reserve,
            short_prompt_share=share,
            preemption=preemption,
            jump_forward=jump_forward,
            min_shared_tokens=min_shared_tokens,
        )
        self.rig = GroupedRig(
            further,
            config,
            SCHEDULING_POLICIES[policy](SCHEDULING),
            EVICTION_POLICIES[eviction](EVICTION),
            prefix_cache=prefix_cache,
            is_invalid=is_invalid if invalid else None,
        )
        if drafts != "none" and not states:
            self.rig.enable_drafts(SCRIPTS[drafts], num_steps)

    @rule(
        stem=st.integers(0, 2),
        stem_len=st.integers(0, 18),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        max_tokens=st.none() | st.integers(1, 6),
        temperature=st.sampled_from([0.0, 1.0]),
        min_tokens=st.integers(0, 1),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        priority=st.integers(0, 2),
        namespace=st.sampled_from(["", "", "tenant"]),
        deadline=st.none() | st.integers(1, 20),
        script=st.none() | st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=1, max_size=12),
        again=st.booleans(),
    )
    def add(
        self,
        stem: int,
        stem_len: int,
        tail: list[int],
        max_tokens: int | None,
        temperature: float,
        min_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        priority: int,
        namespace: str,
        deadline: int | None,
        script: list[int] | None,
        again: bool,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            seed=len(self.rig.requests),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        tokens = [(stem * 11 + i) % VOCAB for i in range(stem_len)] + tail
        if again and self.rig.requests:  # whole pages that may all be in the cache
            earlier = self.rig.requests[max(self.rig.requests)]
            known, size = [*earlier.message.token_ids, *earlier.got][:23], self.rig.config.page_size
            tokens = known[: len(known) // size * size] or tokens
        grammar = None if script is None else lambda: Script(script, VOCAB)
        self.rig.add(tokens, params, priority, namespace, None if deadline is None else float(deadline), grammar)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase


def crowds(first: int) -> list[Any]:
    """Policies and overlap: each policy has one of both in each run, the next policy the other."""
    return [
        pytest.param(policy, overlap, marks=[pytest.mark.soak] * ((first + place + overlap) % 2))
        for place, policy in enumerate(sorted(SCHEDULING_POLICIES))
        for overlap in (False, True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "overlap"), crowds(0))
def test_crowd(policy: str, overlap: bool) -> None:
    """Many requests over a small pool: constant eviction and preemption."""
    rng = random.Random(policy)
    config = SchedulerConfig(
        page_size=4,
        num_pages=1 + 24,
        max_running=8,
        token_budget=10,
        max_context=64,
        vocab_size=VOCAB,
        eos_ids=(EOS,),
        overlap=overlap,
        growth_reserve=4,
        min_shared_tokens=4,
    )
    rig = SchedulerRig(config, SCHEDULING_POLICIES[policy](SCHEDULING))
    for i in range(80):
        prompt = list(range(rng.choice((0, 4, 12)))) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=rng.choice((0.0, 1.0)), seed=i, ignore_eos=rng.random() < 0.8)
        rig.add(prompt, params, priority=rng.randint(0, 3))
        for _ in range(rng.choice((0, 0, 2))):
            rig.step()
    rig.run()
    assert rig.scheduler.get_load()["preempted"] > 0
    assert rig.scheduler.get_load()["cached_tokens"] > 0


@pytest.mark.parametrize(("policy", "overlap"), crowds(1))
def test_preempted_crowd_with_one_prefix(policy: str, overlap: bool) -> None:
    """Requests with a common prefix are preempted and their prefix is evicted, with room for all:
    the rig checks that none waits."""
    rng = random.Random(policy)
    config = SchedulerConfig(
        page_size=2, num_pages=1000, max_running=16, token_budget=12, max_context=64, vocab_size=VOCAB, overlap=overlap, min_shared_tokens=4
    )
    rig = SchedulerRig(config, SCHEDULING_POLICIES[policy](SCHEDULING))
    planner = rig.scheduler._planner
    for i in range(60):
        params = SamplingParams(max_tokens=rng.randint(8, 40), temperature=0.0, ignore_eos=True)
        rig.add([*range(16), i % VOCAB], params, priority=rng.randint(0, 1))
        for _ in range(rng.choice((0, 2, 5))):
            rig.step()
        if rng.random() < 0.3:
            for request in list(planner._running.requests):
                planner.preempt(request)
            rig.scheduler.flush_cache()
    rig.run()
    assert rig.scheduler.get_load()["preempted"] > 0
