"""Steps that raise: the requests at fault end, and all others yield what they would have."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.runner import UnsampledStep
from frame.core.messages import Finish
from frame.testing.fake_runner import DoneStep, FakeRunner, LaterStep
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.scripted_grammar import Script
from tests.core.scheduling.small_rig import VOCAB, config, params, policy, prompt

POISON = 7  # a token id


class FailingStep(DoneStep):
    """A step that raises when it is waited for. What it stored is invalid then."""

    def wait(self) -> StepResult:
        self.ends(self.result.step)
        raise ValueError("poison")


class FailingRunner(FakeRunner):
    """A runner whose steps raise if `is_bad(tokens of each row)`."""

    def __init__(self, harness: SchedulerRig, is_bad: Callable[[list[list[int]]], bool]) -> None:
        given = harness.config
        super().__init__(given.num_pages, given.page_size, given.max_running, given.max_pages, given.vocab_size)
        self.is_bad = is_bad
        self.num_failed = 0
        self.alone: list[bool] = []  # of each step: whether it had one row

    def launch(self, batch: ScheduledBatch) -> DoneStep | LaterStep:
        computed = (batch.num_computed + batch.num_scheduled).tolist()
        launched = super().launch(batch)
        self.alone.append(len(batch.slots) == 1)
        rows = [self._slots[slot].tokens[:count] for slot, count in zip(batch.slots.tolist(), computed, strict=True)]
        if not self.is_bad(rows):
            return launched
        if isinstance(launched, UnsampledStep):
            launched.sample(None)
        self.num_failed += 1
        written = [
            (self._table[slot, position // self.page_size], position % self.page_size)
            for row, slot in enumerate(batch.slots.tolist())
            if batch.skip_kv_store is None or not batch.skip_kv_store[row]
            for position in range(int(batch.num_computed[row]), computed[row])
        ]

        def end(step: int) -> None:
            self._end(step)
            for place in written:
                self._token[place] = -1  # a request that reads it is told of a wrong token

        return FailingStep(StepResult(step=batch.step, token_ids=batch.slots[:0]), end)


class FailingRig(SchedulerRig):
    """Commits a step that raises as the engine does."""

    def __init__(self, is_bad: Callable[[list[list[int]]], bool], **changes: object) -> None:
        super().__init__(config(**changes), policy())
        self.runner = self.failing = FailingRunner(self, is_bad)
        self.counted = 0

    def commit(self) -> None:
        batch, pending = self._in_flight[0]
        if not isinstance(pending, FailingStep):
            super().commit()
            return
        self._in_flight.popleft()
        with pytest.raises(ValueError, match="poison"):
            pending.wait()
        failed = self.scheduler.fail_step(batch, "poison")
        assert not set(failed.retried) & set(failed.ended.rids)
        self.counted += failed.is_first
        self._receive(failed.ended)

    def _sample(self) -> None:
        if self._in_flight and not isinstance(self._in_flight[-1][1], FailingStep):
            super()._sample()

    def _check_admission(self, batch: ScheduledBatch | None, has_preempted: bool) -> None:
        if not self.scheduler._planner._suspects:
            super()._check_admission(batch, has_preempted)

    def _check_request(self, rid: str, request: object) -> None:
        if self.requests[rid].finish != Finish("error", error="poison"):
            super()._check_request(rid, self.requests[rid])


def has_poison(rows: Sequence[Sequence[int]]) -> bool:
    return any(POISON in row for row in rows)


def expected_end(whole: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], bool]:
    """The tokens that a request yields, and whether it ends by the poison, which a step computes
    after it was sampled."""
    if POISON in tokens:
        return [], True
    if POISON in whole[:-1]:
        return list(whole[: whole.index(POISON) + 1]), True
    return list(whole), False


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_only_the_requests_at_fault_end(overlap: bool, seed: int) -> None:
    """Prompts and outputs with the poison, shared prefixes, chunks, scarce pages, grammars and
    log-probabilities."""
    draw = random.Random(seed)
    harness = FailingRig(has_poison, overlap=overlap, num_pages=draw.choice((26, 60)), token_budget=draw.choice((8, 40)), max_running=6)
    prefix = [token for token in prompt(12, seed) if token != POISON]
    for _ in range(14):
        tokens = [*prefix[: draw.randrange(len(prefix))], *(draw.randrange(8, VOCAB) for _ in range(draw.randrange(1, 24)))]
        if draw.random() < 0.2:
            tokens[draw.randrange(len(tokens))] = POISON
        grammar = (lambda: Script([6, 1, 9, 4, 1, 1, 8], VOCAB)) if draw.random() < 0.2 else None
        more = {"prompt_logprobs": 1} if draw.random() < 0.2 else {}
        harness.add(tokens, params(max_tokens=draw.randrange(1, 16), logprobs=draw.choice((None, 1)), **more), grammar=grammar)
        for _ in range(draw.randrange(3)):
            harness.step()
    harness.run()
    ends = {}
    for rid, request in harness.requests.items():
        whole, ends[rid] = expected_end(request.whole, request.message.token_ids)
        assert (request.got, request.finish == Finish("error", error="poison")) == (whole, ends[rid]), rid
    assert any(ends.values())
    assert not all(ends.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_fail_for_several_rows_alone_end_no_request(overlap: bool) -> None:
    harness = FailingRig(lambda rows: len(rows) > 1, overlap=overlap, token_budget=8)
    for i in range(4):
        harness.add(prompt(20, i), params(max_tokens=4))
    harness.run()
    assert {request.finish for request in harness.requests.values()} == {Finish("length")}
    assert harness.failing.num_failed > 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_and_its_retries_count_once(overlap: bool) -> None:
    harness = FailingRig(lambda rows: True, overlap=overlap)
    for i in range(4):
        harness.add(prompt(6, i), params(max_tokens=4))
    harness.run()
    assert {request.finish for request in harness.requests.values()} == {Finish("error", error="poison")}
    assert harness.counted == 1
    if not overlap:
        assert harness.failing.alone == [False, True, True, True, True]


def test_a_suspect_waits_for_pages_of_others_and_is_admitted_before_them() -> None:
    """Four pages are left of eleven: the request at fault fits when another has ended."""
    harness = FailingRig(has_poison, num_pages=12, max_running=3)
    first = harness.add(prompt(16, 1), params(max_tokens=12))
    harness.step()
    bad, late = harness.add([POISON] * 12, params(max_tokens=2)), harness.add(prompt(9, 2), params(max_tokens=2))
    harness.run()
    assert harness.requests[bad].finish == Finish("error", error="poison")
    assert harness.requests[first].finish == harness.requests[late].finish == Finish("length")
