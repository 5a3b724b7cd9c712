"""The draft length that pays off is used in most steps."""

from __future__ import annotations

from collections import Counter

import pytest

from frame.core.scheduling.speculation import PROBE_STEPS, DraftLength


def run(lengths: DraftLength, rates: dict[int, float], steps: int, rows: int = 8) -> Counter[int]:
    """How often each length was chosen. rates: output tokens a second and row, by length."""
    chosen: Counter[int] = Counter()
    for _ in range(steps):
        length = lengths.choose(rows)
        chosen[length] += 1
        lengths.record(rows, length, rows * (1 + length), rows * (1 + length) / rates[length])
    return chosen


@pytest.mark.parametrize("best", [0, 1, 2, 4])
def test_best_length_is_used(best: int) -> None:
    chosen = run(DraftLength(4, is_adaptive=True), {length: 2.0 if length == best else 1.0 for length in (0, 1, 2, 4)}, 2000)
    assert chosen[best] > 0.96 * 2000
    assert set(chosen) == {0, 1, 2, 4}


def test_equal_rates_choose_no_drafts() -> None:
    assert run(DraftLength(4, is_adaptive=True), dict.fromkeys((0, 1, 2, 4), 1.0), 1000)[0] > 900


def test_change_of_the_rates_is_noticed() -> None:
    lengths = DraftLength(3, is_adaptive=True)
    run(lengths, {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}, 600)
    assert run(lengths, {0: 1.0, 1: 0.9, 2: 0.8, 3: 0.7}, 2000)[0] > 1400


def test_sizes_of_batches_have_their_own_lengths() -> None:
    lengths = DraftLength(2, is_adaptive=True)
    for _ in range(300):
        run(lengths, {0: 1.0, 1: 2.0, 2: 3.0}, 1, rows=1)
        run(lengths, {0: 3.0, 1: 2.0, 2: 1.0}, 1, rows=64)
    assert run(lengths, {0: 1.0, 1: 2.0, 2: 3.0}, 60, rows=1)[2] >= 60 - PROBE_STEPS
    assert run(lengths, {0: 3.0, 1: 2.0, 2: 1.0}, 60, rows=64)[0] >= 60 - PROBE_STEPS


def test_fixed_length() -> None:
    assert run(DraftLength(3, is_adaptive=False), {3: 1.0}, 50) == {3: 50}
