"""Workloads come from their seed; arrivals have the rate that was asked for."""

from __future__ import annotations

import math
import random

import pytest

from frame.entrypoints.tools.bench.workload import SHAPES, Arrivals, Shape, changed, span


def test_a_seed_gives_the_same_jobs_and_another_gives_others() -> None:
    first, again, other = (SHAPES["mixed"].jobs(2000, seed) for seed in (3, 3, 4))
    assert first == again
    assert not {tuple(job.prompt) for job in first} & {tuple(job.prompt) for job in other}


def test_lengths_groups_and_ids_are_as_asked() -> None:
    found = Shape(12, (5, 9), (2, 3), shared=4, groups=3).jobs(50, 0)
    assert {len(job.prompt) - 4 for job in found} <= set(range(5, 10))
    assert {job.output for job in found} == {2, 3}
    assert len({tuple(job.prompt[:4]) for job in found}) == 3
    assert all(10 <= token < 50 for job in found for token in job.prompt)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0])
def test_arrivals_keep_to_their_rate(burstiness: float) -> None:
    times = Arrivals(10.0, burstiness).times(20_001, random.Random(0))
    assert times == sorted(times)
    assert times[0] == 0
    assert math.isclose(times[-1] / 20_000, 0.1, rel_tol=0.1)


def test_without_a_rate_all_come_at_once() -> None:
    assert {job.at for job in Shape(5, (1, 1), (1, 1)).jobs(100, 0)} == {0.0}


def test_spans() -> None:
    assert (span("7"), span("3:9")) == ((7, 7), (3, 9))
    for wrong in ("", "0", "9:3", "a"):
        with pytest.raises(ValueError):
            span(wrong)
    assert changed(Shape(1, (1, 1), (1, 1)), requests=4, input=None).requests == 4
