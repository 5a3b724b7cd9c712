"""Steps stay within the target where they can, prompts go on where they cannot, and the tokens are
those without a target."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frame import Engine, SamplingParams
from frame.core.interfaces.batch import ScheduledBatch
from frame.core.scheduling.running import StepRecord
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.latency_budget import AIM, DEFAULT_MINIMUM, DEFAULT_TARGET, FIRST, TILE, LatencyBudget
from frame.testing.scheduler_rig import InOrder, SchedulerRig

MAXIMUM = 8192
Device = Callable[[int, int], float]  # seconds of a step by its decodes and prompt tokens


def card(num_decodes: int, num_prompt_tokens: int) -> float:
    """Llama-3.1-8B on an H200: weights are read, or products computed; KV is read."""
    return max(4e-3, 23e-6 * (num_decodes + num_prompt_tokens)) + 20e-6 * num_decodes


class Clock:
    """A budget beside a device on a virtual clock."""

    def __init__(self, target: float, device: Device = card) -> None:
        self.budget, self.device, self.now, self.step = LatencyBudget(target, MAXIMUM), device, 0.0, 0

    def run(self, num_decodes: int, waiting: int, encoded: int = 0) -> tuple[int, float]:
        """A step with as many of the waiting prompt tokens as it may have. encoded: tokens that
        take as long as its media. -> how many, and the step's seconds."""
        tokens = min(waiting, self.budget.choose(self.step, num_decodes, self.now))
        if encoded:
            self.budget.note_encoded(encoded)
        seconds = self.device(num_decodes, tokens + encoded)
        self.now += seconds
        rows = [1] * num_decodes + ([tokens] if tokens else [])
        nothing = np.empty(0, np.int64)
        self.budget.record_step(StepRecord(self.step, nothing, nothing, nothing, np.array(rows), nothing, num_decodes), self.now)
        self.step += 1
        return tokens, seconds


def test_chunks_fill_the_target_and_no_more() -> None:
    for target in (0.01, 0.02, 0.04):
        clock = Clock(target)
        for _ in range(50):
            clock.run(24, 0)
        steps = [clock.run(24, 10**6) for _ in range(200)]
        assert max(seconds for _, seconds in steps[4:]) < target
        assert max(seconds for _, seconds in steps[100:]) > AIM * target - TILE * 24e-6  # a tile more is too long


def test_media_beside_decodes_teach_nothing_wrong() -> None:
    """The budget of prompts after many steps with layers of encoders is that after none, less a
    tile: their rows cost more where they are few."""
    budgets = []
    for encoded in (0, 500):
        clock = Clock(0.03)
        for _ in range(100):
            clock.run(24, 0)
            clock.run(24, 0, encoded)
            clock.run(24, 2000)
        budgets.append(max(clock.run(24, 10**6)[0] for _ in range(3)))
    assert budgets[0] - TILE <= budgets[1] <= budgets[0]


def test_prompts_of_arrivals_stay_within_the_target() -> None:
    clock, numbers = Clock(0.03), random.Random(1)
    waiting, late, mixed = 0, 0, 0
    for _ in range(3000):
        waiting += numbers.randrange(512, 1536) if numbers.random() < 0.2 else 0
        tokens, seconds = clock.run(numbers.randrange(8, 60), waiting)
        waiting -= tokens
        mixed += tokens > 0
        late += seconds > 0.03
    assert mixed > 500 and late <= 0.01 * mixed


def test_a_step_without_decodes_has_the_whole_budget() -> None:
    clock = Clock(0.005)
    clock.run(24, 10**6)
    assert clock.run(0, 10**6)[0] == MAXIMUM


def test_the_first_chunks_beside_decodes_are_short() -> None:
    assert Clock(0.04).run(8, 10**6)[0] == FIRST - 8  # rows are whole tiles


def test_prompts_go_on_where_decodes_exceed_the_target() -> None:
    clock = Clock(0.002)
    for _ in range(20):
        clock.run(24, 0)
    assert {clock.run(24, 10**6)[0] for _ in range(40)} >= {TILE}
    assert clock.run(24, 10**6)[0] == TILE


def test_a_minimum_is_kept_however_long_it_takes() -> None:
    """Chunks grow beyond it where the device computes more within the target."""
    for seconds, sizes in ((100e-6, {DEFAULT_MINIMUM}), (2e-6, {DEFAULT_MINIMUM, 2 * DEFAULT_MINIMUM, MAXIMUM})):
        clock = Clock(0.03, lambda decodes, tokens, seconds=seconds: seconds * (decodes + tokens))
        clock.budget = LatencyBudget(DEFAULT_TARGET, MAXIMUM, DEFAULT_MINIMUM)
        found = {clock.run(24, 10**6)[0] for _ in range(40)}
        assert min(found) == DEFAULT_MINIMUM
        assert {-(-size // DEFAULT_MINIMUM) * DEFAULT_MINIMUM for size in found} == sizes


def test_steps_that_compiled_kernels_are_forgotten() -> None:
    clock = Clock(0.03)
    slow = iter([5.0, 3.0, 2.0])
    clock.device = lambda decodes, tokens: next(slow, 0.0) + card(decodes, tokens)
    for _ in range(20):
        clock.run(24, 0)
    clock.device = lambda decodes, tokens: card(decodes, tokens) + (1.0 if clock.step == 20 else 0.0)
    steps = [clock.run(24, 10**6) for _ in range(30)]
    assert all(seconds < 0.03 for _, seconds in steps[1:])
    assert steps[-1][0] > 4 * TILE


def test_steps_that_cost_nothing_say_nothing_of_long_ones() -> None:
    """128 tokens are computed while the weights are read. Then steps without prompts follow."""
    clock = Clock(0.03)
    clock.device = lambda decodes, tokens: card(decodes, tokens) + (0.4 if clock.step == 0 else 0.0)
    clock.run(0, 300)
    for step in range(40):
        clock.run(8, 300 if step % 4 == 1 else 0)
    assert all(clock.run(24, 2048 if step % 3 else 0)[1] < 0.03 for step in range(300))


def test_drafts_are_no_prompts() -> None:
    clock, nothing = Clock(0.03), np.empty(0, np.int64)
    first = clock.budget.choose(0, 8, 0.0)
    drafts = np.full(8, 63)
    clock.budget.record_step(StepRecord(0, nothing, nothing, nothing, drafts + 1, nothing, 0, num_drafts=drafts), 5.0)
    assert clock.budget.choose(1, 8, 5.0) == first


def test_rows_are_whole_tiles() -> None:
    clock = Clock(0.02)
    for _ in range(20):
        clock.run(24, 0)
    tokens = [clock.run(24, 10**6)[0] for _ in range(30)]
    assert all((count + 24) % TILE == 0 or count == TILE for count in tokens[1:])


@settings(max_examples=30)
@given(
    target=st.floats(1e-4, 1.0), steps=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 20_000), st.floats(0.0, 100.0)), max_size=60)
)
def test_budgets_have_bounds(target: float, steps: list[tuple[int, int, float]]) -> None:
    clock = Clock(target)
    for num_decodes, waiting, seconds in steps:
        clock.device = lambda decodes, tokens, seconds=seconds: seconds  # type: ignore[misc]
        clock.run(num_decodes, waiting)
        assert TILE <= clock.budget.choose(10**6, num_decodes, clock.now) <= MAXIMUM


class LimitedRig(SchedulerRig):
    """A scheduler with a target, whose steps take times that are drawn. No step may have more
    prompt tokens than its budget."""

    def __init__(self, config: SchedulerConfig, seed: int, target: float) -> None:
        super().__init__(config, InOrder())
        self.numbers, self.limits = random.Random(seed), dict[int, int]()
        self.scheduler._planner.prompt_budget = self
        self._budget = LatencyBudget(target, config.token_budget)

    def choose(self, step: int, num_decodes: int, now: float) -> int:
        self.limits[step] = self._budget.choose(step, num_decodes, now)
        return self.limits[step]

    def record_step(self, record: StepRecord, now: float) -> None:
        self._budget.record_step(record, now)

    def _check_budget(self, batch: ScheduledBatch) -> None:
        super()._check_budget(batch)
        assert batch.num_scheduled[batch.num_decodes :].sum() <= self.limits[batch.step] <= self.config.token_budget

    def _check_admission(self, batch: ScheduledBatch | None, has_preempted: bool) -> None:
        """A request may wait: the budget is smaller than the configured one."""

    def commit(self) -> None:
        self.now += self.numbers.choice((0.001, 0.01, 0.5))
        super().commit()


class NarrowRig(SchedulerRig):
    """A scheduler whose steps with decodes have room for 64 prompt tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config, InOrder())
        self.scheduler._planner.prompt_budget = self
        self.chunks: list[int] = []  # of each step, the prompts

    def choose(self, step: int, num_decodes: int, now: float) -> int:
        return 64 if num_decodes else self.config.token_budget

    def record_step(self, record: StepRecord, now: float) -> None:
        """The room never changes."""

    def _check_budget(self, batch: ScheduledBatch) -> None:
        super()._check_budget(batch)
        self.chunks.append(len(batch.num_scheduled) - batch.num_decodes)

    def _check_admission(self, batch: ScheduledBatch | None, has_preempted: bool) -> None:
        """A request may wait: the budget is smaller than the configured one."""


def test_what_cannot_be_divided_goes_alone() -> None:
    """A prompt that is computed whole exceeds the target by itself, and takes no other with it."""
    sizes: dict[str, Any] = {"page_size": 16, "num_pages": 200, "max_running": 8, "max_context": 1000, "vocab_size": 97}
    rig = NarrowRig(SchedulerConfig(token_budget=1024, overlap=False, short_prompt_share=0.0, whole_prompts=True, **sizes))
    rig.add([3] * 8, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    rig.step()
    for number in range(3):
        rig.add([5 + number] * 200, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    rig.run(max_steps=200)
    assert sum(rig.chunks) == 4 and max(rig.chunks) == 1


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6), overlap=st.booleans(), share=st.sampled_from([0.0, 0.5, 0.9]), target=st.sampled_from([1e-6, 0.02, 10.0]),
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=8), pages=st.sampled_from([64, 128]),
)  # fmt: skip
def test_no_request_starves(seed: int, overlap: bool, share: float, target: float, lengths: list[int], pages: int) -> None:
    limits: dict[str, Any] = {"page_size": 16, "num_pages": 1 + pages, "max_running": 4, "max_context": 1000, "vocab_size": 97}
    rig = LimitedRig(SchedulerConfig(token_budget=512, overlap=overlap, short_prompt_share=share, **limits), seed, target)
    for number, length in enumerate(lengths):
        prompt = [(number + 7 * place) % 97 for place in range(length)]
        rig.add(prompt, SamplingParams(max_tokens=1 + number % 20, temperature=0.0, ignore_eos=True))
        for _ in range(number % 3):
            rig.step()
    rig.run(max_steps=4000)  # it checks every token


@pytest.mark.slow
def test_tokens_are_those_without_a_target() -> None:
    numbers = random.Random(3)
    prompts = [[numbers.randrange(10, 900) for _ in range(numbers.randrange(200, 500))] for _ in range(8)]
    params = [SamplingParams(temperature=0.0, max_tokens=16 + 4 * row, ignore_eos=True) for row in range(8)]
    keys: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192, "chunked_prefill_size": 1024, "threads": 1}

    def generate(**more: Any) -> tuple[list[list[int]], int]:
        with Engine(model="frame-tiny", skip_tokenizer_init=True, max_running_requests=4, **keys, **more) as engine:
            outputs = engine.generate(prompts, params)
            return [output.token_ids for output in outputs], engine.control("server_info")["step"]

    (tokens, steps), (expected, fewer) = generate(target_itl_ms=0.001), generate()
    assert tokens == expected
    assert steps > fewer
