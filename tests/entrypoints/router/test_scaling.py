"""`DesiredReplicas`: a day's curve on simulated replicas, and a queueing model under many loads."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from httpx import AsyncClient
from hypothesis import given, settings
from hypothesis import strategies as st

from frame.config.schema import FrameConfig
from frame.entrypoints.router import replicas
from frame.entrypoints.router.scaling import DesiredReplicas, FleetSignals, ScalingTargets, find_percentile, read_inter_token
from frame.entrypoints.tools.simulate.measures import Measures
from frame.entrypoints.tools.simulate.simulation import Simulation, parse_cluster
from frame.entrypoints.tools.simulate.workload import Distribution
from tests.entrypoints.tools.simulate.test_simulation import LLAMA_8B


def drive(loads: list[float], capacity: float, targets: ScalingTargets, interval: float = 2.0) -> tuple[list[int], list[bool]]:
    """Replicas of which each serves `capacity` requests within the target. -> (desired, whether
    the target was kept) at each time; a replica serves `lead` seconds after it was asked for."""
    controller, ready, desired, kept = DesiredReplicas(targets), [0.0] * targets.minimum, [], []
    for number, load in enumerate(loads):
        now = number * interval
        serving = sum(at <= now for at in ready)
        latency = 0.2 + 0.8 * (load / serving / capacity) ** 4
        count = controller.update(FleetSignals(now, serving, len(ready) - serving, load, latency, 0.0))
        ready = sorted(ready)[:count] + [now + targets.lead] * max(0, count - len(ready))
        desired.append(count)
        kept.append(latency <= 1.0)
    return desired, kept


def count_turns(desired: list[int], loads: list[float], slack: int) -> int:
    """Changes against the load's direction over `slack` steps on both sides."""
    turns = 0
    for number in range(1, len(desired)):
        change = desired[number] - desired[number - 1]
        before, after = loads[max(0, number - slack)], loads[min(len(loads) - 1, number + slack)]
        turns += (change < 0 and after > 1.05 * before) or (change > 0 and after < 0.95 * before)
    return turns


TARGETS = ScalingTargets(1.0, None, 1, 64, hold=300, lead=30)


@settings(max_examples=60, deadline=None)
@given(st.floats(4, 40), st.floats(1.5, 20), st.floats(0, 0.15), st.integers(0, 2**31), st.integers(900, 3000))
def test_a_day_has_no_flapping_and_keeps_the_target(capacity: float, peak: float, noise: float, seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    curve = capacity * peak * (0.55 - 0.45 * np.cos(2 * np.pi * np.arange(steps) / steps))
    loads = (curve * (1 + noise * rng.standard_normal(steps)).clip(0.2)).tolist()
    desired, kept = drive(loads, capacity, TARGETS)
    assert count_turns(desired, curve.tolist(), 100) <= 2
    first = next((number for number, each in enumerate(kept) if not each), 0)
    after = kept[first + 60 :]  # the limit is learned when the target is missed for the first time
    assert sum(after) >= 0.95 * len(after)
    assert max(desired) <= math.ceil(2.5 * peak) + 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.05, 100), st.integers(0, 10), st.integers(0, 5), st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 100)),
        max_size=200,
    )
)
def test_any_signals_give_a_number_in_the_bounds(signals: list[tuple[float, int, int, float, float, float]]) -> None:
    controller, now = DesiredReplicas(ScalingTargets(0.5, 0.05, 2, 9)), 0.0
    for elapsed, serving, joining, load, first_token, inter_token in signals:
        now += elapsed
        assert 2 <= controller.update(FleetSignals(now, serving, joining, load, first_token, inter_token)) <= 9
        assert controller.limit >= 1


def test_a_steady_load_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    desired, kept = drive((100 + 5 * rng.standard_normal(4000)).tolist(), 20, TARGETS)
    assert len(set(desired[500:])) == 1
    assert all(kept[500:])


def test_replicas_are_removed_after_the_hold_and_one_by_one() -> None:
    desired, _ = drive([100.0] * 600 + [5.0] * 1200, 20, TARGETS)
    removed = [number * 2 for number in range(1, len(desired)) if desired[number] < desired[number - 1]]
    assert desired[-1] == 1
    assert 1200 + TARGETS.hold <= removed[0] <= 1200 + 1.5 * TARGETS.hold
    assert min(b - a for a, b in pairwise(removed)) > TARGETS.lead


def test_a_load_that_comes_back_within_the_hold_removes_none() -> None:
    """Two minutes of each load: without the hold, replicas come and go all the time."""
    loads = [100.0 if number // 60 % 2 else 20.0 for number in range(1500)]
    desired, _ = drive(loads, 20, TARGETS)
    assert max(desired) >= 5
    assert desired == sorted(desired)


def test_a_router_that_starts_keeps_the_replicas_that_it_finds() -> None:
    controller = DesiredReplicas(TARGETS)
    desired = [controller.update(FleetSignals(2.0 * number, 12, 0, 150.0, 0.5, 0.0)) for number in range(400)]
    assert set(desired) == {12}  # the targets are kept, but not with much room
    idle = DesiredReplicas(TARGETS)
    assert [idle.update(FleetSignals(now, 12, 0, 1.0, 0.1, 0.0)) for now in (0.0, 299.0, 302.0)] == [12, 12, 11]


def test_a_replica_that_never_serves_does_not_stop_the_others() -> None:
    controller = DesiredReplicas(TARGETS)
    desired = [controller.update(FleetSignals(2.0 * number, 4, 1, 200.0, 3.0, 0.0)) for number in range(200)]
    assert set(desired[:40]) == {4}  # it may take a part of the load soon
    assert desired[-1] > 4


@pytest.mark.parametrize(
    ("header", "seconds"), [("0.013", 0.013), ("", 0.0), ("1 2 3", 0.0), ("nan", 0.0), ("1e9", 0.0), ("-1", 0.0), ("é", 0.0)]
)
def test_a_replicas_header_is_read_or_ignored(header: str, seconds: float) -> None:
    assert read_inter_token(header) == seconds


def test_percentiles() -> None:
    assert (find_percentile([]), find_percentile([3.0]), find_percentile([*range(10)])) == (0.0, 3.0, 9)


def test_a_long_queue_costs_an_update_no_sort_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(seconds: list[float]) -> float:
        calls.append(len(seconds))
        return find_percentile(seconds)

    monkeypatch.setattr(replicas, "find_percentile", count)
    backends = replicas.Backends(["http://127.0.0.1:1"], AsyncClient(), 1.0)
    backends.desired = DesiredReplicas(TARGETS)
    now = time.monotonic()
    backends.first_tokens.extend((now, 0.1) for _ in range(100))
    for number in range(1000):
        backends.all[0].first_bytes.start(now - number - 1)
    backends.update_desired()
    assert calls == [100, 1100]


@pytest.mark.slow
def test_a_day_on_simulated_replicas(tmp_path: Path) -> None:
    """One to several replicas and back: the target is kept while none starts, and there are at most
    two changes without need."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = FrameConfig.model_validate({"model": {"path": str(tmp_path), "skip_tokenizer_init": True}})
    measures = Measures(0.012)
    fleet = Simulation.build(config, parse_cluster("8xh200")).make_fleet(measures, 1)
    controller = DesiredReplicas(ScalingTargets(0.5, None, 1, 8, hold=15.0, lead=4.0))
    sizes, kept, seen = [(0.0, 1)], [], 0

    def control(now: float) -> None:
        nonlocal seen
        latency, seen = find_percentile(measures.first_tokens[seen:]), len(measures.first_tokens)
        starting = fleet.num_wanted - len(fleet.loads)
        count = controller.update(FleetSignals(now, len(fleet.loads), starting, fleet.num_requests, latency, 0.0))
        if not starting:
            kept.append(latency <= 0.5)
        if count != fleet.num_wanted:
            sizes.append((now, count))
        fleet.scale(count, now, 4.0)

    fleet.run(Distribution(16, 120, (2048, 4096), (16, 32), day=120).draw(32_000, 5), control, 1.0)
    changes = [(at, after - before) for (_, before), (at, after) in pairwise(sizes)]
    assert max(count for _, count in sizes) >= 3
    assert sizes[-1][1] <= 2
    assert sum((change < 0) == (at < 60) for at, change in changes) <= 2
    assert sum(kept) >= 0.95 * len(kept)
