"""A call's time is what it takes; on a GPU a recorded call is timed as a graph, and one that cannot be recorded by events."""

from __future__ import annotations

import time

import pytest
import torch

from frame.entrypoints.bench.clock import Clock, measured_ceilings

CPU = torch.device("cpu")


def test_calls_in_turn_are_timed_each() -> None:
    made = []
    timed = Clock(CPU, budget=0.02).time([lambda: (made.append(0), time.sleep(0.001)), lambda: (made.append(1), time.sleep(0.003))])
    assert timed.how == "host"
    assert 0.002 <= timed.seconds < 0.05
    assert made[:4] == [0, 1, 0, 1]


def test_ceilings_are_of_this_machine() -> None:
    found = measured_ceilings(CPU, torch.float32)
    assert 1e8 < found.read < 1e13
    assert 1e8 < found.copy < 1e13
    assert 1e8 < found.operations < 1e14


@pytest.mark.gpu
def test_what_waits_for_the_device_is_timed_by_events() -> None:
    device = torch.device("cuda")
    x = torch.randn(1 << 20, device=device)
    clock = Clock(device, budget=0.02)
    assert clock.time([lambda: x * 2]).how == "graph"
    assert clock.time([lambda: (x * 2).sum().item()]).how == "events"
    assert clock.time([lambda: x * 2]).how == "graph"
