"""The draft lengths of steps and slots bring nearly the highest output rate, with simulated drafts
and step times."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from frame.speculation.draft_lengths import PROBE_STEPS, DraftLengths

Cost = Callable[[int, int, int], float]  # rows, length of the step, drafted tokens -> seconds


class Simulation:
    """Rows whose drafted tokens are accepted with a probability each."""

    def __init__(self, rates: list[float], num_steps: int, cost: Cost, *, is_adaptive: bool = True, noise: float = 0.0) -> None:
        self.rates = np.array(rates)
        self.num_steps, self.cost, self.noise = num_steps, cost, noise
        self.lengths = DraftLengths(len(rates), num_steps, is_adaptive=is_adaptive)
        self.numbers = np.random.default_rng(1)
        self.last = -1

    def run(self, steps: int, fixed: int | None = None) -> float:
        """Output tokens a second."""
        tokens = seconds = 0.0
        self.chosen = np.zeros(self.num_steps + 1, np.int64)
        self.drafted = np.zeros(len(self.rates), np.int64)
        slots, rows = np.arange(len(self.rates)), len(self.rates)
        for _ in range(steps):
            length = self.lengths.choose(rows)
            drafted = np.minimum(self.lengths.limit(slots), length)
            if fixed is not None:
                length, drafted = fixed, np.full(rows, fixed)
            hits = self.numbers.random((rows, self.num_steps)) < self.rates[:, None]
            accepted = (hits & (np.arange(self.num_steps) < drafted[:, None])).cumprod(axis=1).sum(axis=1)
            has_draft = drafted > 0
            self.lengths.count(slots[has_draft], drafted[has_draft], accepted[has_draft])
            self.lengths.observe(rows, length, np.array([(accepted > place).sum() for place in range(self.num_steps)]))
            took = self.cost(rows, length, int(drafted.sum())) * (1 + self.noise * (self.numbers.random() - 0.5))
            if length == self.last:
                self.lengths.record(rows, length, int(drafted.sum()), took)
            self.last = length
            self.chosen[length] += 1
            self.drafted += drafted
            tokens, seconds = tokens + rows + accepted.sum(), seconds + took
        return tokens / seconds


def by_tokens(rows: int, length: int, drafted: int) -> float:
    """A processor: each token costs, and a step with drafts cannot overlap."""
    return 4.0 + 0.25 * (rows + drafted) + 0.3 * (length > 0)


def by_length(rows: int, length: int, drafted: int) -> float:
    """A device drafter: each position costs a pass of the drafter, tokens nearly nothing."""
    return 5.0 + 0.3 * length + 0.002 * drafted


@pytest.mark.pairwise
@pytest.mark.parametrize("cost", [by_tokens, by_length])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_rate_is_nearly_that_of_the_best_fixed_length(cost: Cost, rate: float, rows: int) -> None:
    accepted = [sum(rate**place for place in range(1, fixed + 1)) for fixed in range(4)]  # of a row, the mean
    best = max(rows * (1 + accepted[fixed]) / cost(rows, fixed, rows * fixed) for fixed in range(4))
    used = Simulation([rate] * rows, 3, cost, noise=0.1)
    used.run(200)  # the first probes
    assert used.run(1200) > 0.95 * best


def test_drafts_that_are_always_wrong_are_given_up() -> None:
    used = Simulation([0.0] * 8, 4, by_tokens)
    used.run(2000)
    assert used.chosen[0] > 0.95 * 2000
    assert (used.chosen[[1, 2, 4]] >= PROBE_STEPS).all()


def test_probes_take_little_time_where_drafts_cost_much() -> None:
    """As a batch whose verification computes for as long as its tokens are many."""

    def cost(rows: int, length: int, drafted: int) -> float:
        return 9.0 + 7.3 * length

    used = Simulation([0.0] * 8, 3, cost)
    used.run(10)  # the first measurements
    rate, best = used.run(600), Simulation([0.0] * 8, 3, cost).run(10, 0)
    assert 0.985 * best < rate < best


def test_growth_of_texts_does_not_favour_what_was_measured_earlier() -> None:
    def run(fixed: int | None) -> float:
        steps = itertools.count()
        used = Simulation([0.54] * 16, 3, lambda rows, length, drafted: 5.0 + 1.8 * length + 0.004 * next(steps))
        used.run(200, fixed)
        return used.run(600, fixed)

    assert run(None) > 0.985 * max(run(fixed) for fixed in range(4))


def test_drafter_is_idle_between_probes() -> None:
    used, idle, probes = Simulation([0.0] * 8, 3, by_tokens), [], 0
    used.run(100)
    for _ in range(900):
        used.run(1)
        idle.append(used.lengths.is_idle)
        if used.chosen[0] == 0:
            probes += 1
            assert not any(idle[-8:])
    assert 0.7 * 900 < sum(idle) < 900 - 8 * probes // PROBE_STEPS
    assert probes >= PROBE_STEPS


def test_change_of_the_acceptance_is_noticed() -> None:
    used = Simulation([0.9] * 4, 3, by_tokens)
    used.run(600)
    assert used.chosen[3] > 500
    used.rates[:] = 0.05
    used.run(200)
    assert used.chosen[0] > 100
    assert used.drafted.sum() < 0.3 * 3 * 4 * 200  # before that, the slots' own limits fall
    used.rates[:] = 0.9
    used.run(2000)
    assert used.chosen[3] > 1200


def test_slots_have_their_own_limits() -> None:
    used = Simulation([0.9] * 4 + [0.05] * 4, 3, by_tokens)
    rate = used.run(2000)
    assert used.drafted[:4].min() > 1.8 * 2000
    assert used.drafted[4:].max() < 0.4 * 2000
    assert rate > 1.1 * max(Simulation([0.9] * 4 + [0.05] * 4, 3, by_tokens).run(500, fixed) for fixed in range(4))
    used.rates = used.rates[::-1].copy()
    used.run(400)
    used.run(400)
    assert used.drafted[4:].min() > 1.8 * 400


def test_new_request_in_a_slot_has_a_new_limit() -> None:
    used = Simulation([0.9] * 6 + [0.02] * 2, 3, by_tokens)
    used.run(1000)
    slots = np.arange(8)
    before = used.lengths.limit(slots)
    used.lengths.reset(7)
    after = used.lengths.limit(slots)
    assert before[7] == 0 and after[7] >= 2
    assert after[0] == before[0] >= 3


def test_sizes_of_batches_have_their_own_lengths() -> None:
    def cost(rows: int, length: int, drafted: int) -> float:
        return 1.0 if rows == 1 else 1.0 + drafted

    one, many = Simulation([0.8], 2, cost), Simulation([0.8] * 64, 2, cost)
    many.lengths = one.lengths = DraftLengths(64, 2, is_adaptive=True)
    for _ in range(20):
        one.run(20)
        many.run(20)
    one.run(60)
    many.run(60)
    assert one.chosen[2] >= 60 - PROBE_STEPS
    assert many.chosen[0] >= 60 - PROBE_STEPS


def test_steps_that_are_never_measured_draft_by_the_acceptance() -> None:
    """As with short outputs: between two steps of decodes alone is one with a prompt."""
    used = Simulation([0.1] * 4, 3, by_tokens)
    used.lengths.record = lambda *given: None  # type: ignore[method-assign]
    used.run(1000)
    assert used.drafted.sum() < 0.1 * 3 * 4000
    used.rates[:] = 0.9
    used.run(1500)
    used.run(200)
    assert used.drafted.sum() > 0.8 * 3 * 800


def test_size_without_measurements_uses_those_of_the_nearest() -> None:
    used = Simulation([0.0] * 8, 3, by_tokens)
    used.run(200)
    other = Simulation([0.0] * 12, 3, by_tokens)
    other.lengths = used.lengths
    other.lengths._slots = np.zeros((2, 12))
    other.lengths.record = lambda *given: None  # type: ignore[method-assign]
    other.run(300)
    assert other.chosen[0] > 250


def test_fixed_length() -> None:
    used = Simulation([0.0] * 2, 3, by_tokens, is_adaptive=False)
    used.run(50)
    assert used.chosen[3] == 50
    assert (used.drafted == 150).all()


def test_slow_first_steps_are_forgotten() -> None:
    """Kernels are compiled in the first steps."""
    taken = iter([3000.0] * 3)
    used = Simulation([0.9] * 2, 3, lambda *given: next(taken, by_tokens(*given)))
    used.run(300)
    assert used.chosen[3] > 270


class TreeSimulation:
    """Rows with trees, of which each node is accepted with a probability of its own."""

    def __init__(self, rates: list[float], rows: int, cost: Cost) -> None:
        self.rates, self.rows, self.cost = np.array(rates), rows, cost
        self.lengths = DraftLengths(rows, len(rates), is_adaptive=True, has_trees=True)
        self.numbers = np.random.default_rng(2)

    def run(self, steps: int, fixed: int | None = None) -> float:
        """Output tokens a second."""
        tokens = seconds = 0.0
        slots, last = np.arange(self.rows), -1
        for _ in range(steps):
            length = self.lengths.choose(self.rows) if fixed is None else fixed
            drafted = np.minimum(self.lengths.limit(slots), length)
            assert (drafted == length).all()
            hits = (self.numbers.random((self.rows, len(self.rates))) < self.rates) & (np.arange(len(self.rates)) < length)
            self.lengths.observe(self.rows, length, hits.sum(axis=0))
            took = self.cost(self.rows, length, int(drafted.sum()))
            if length == last:
                self.lengths.record(self.rows, length, int(drafted.sum()), took)
            last, tokens, seconds = length, tokens + self.rows + hits.sum(), seconds + took
        return tokens / seconds


@pytest.mark.parametrize("cost", [by_tokens, by_length])
@pytest.mark.parametrize("rates", [[0.6, 0.2, 0.4, 0.1, 0.2, 0.05], [0.9, 0.02, 0.8, 0.02, 0.7, 0.02], [0.05] * 6])
def test_length_of_trees_is_nearly_the_best(cost: Cost, rates: list[float]) -> None:
    best = max(4 * (1 + sum(rates[:fixed])) / cost(4, fixed, 4 * fixed) for fixed in range(len(rates) + 1))
    used = TreeSimulation(rates, 4, cost)
    used.run(300)  # the first probes
    assert used.run(1200) > 0.95 * best
