"""A call's time is what it takes; ceilings are those of the machine."""

from __future__ import annotations

import time

import torch

from frame.entrypoints.tools.bench.clock import Clock, measured_ceilings

CPU = torch.device("cpu")


def test_calls_in_turn_are_timed_each() -> None:
    made = []
    timed = Clock(CPU, budget=0.02).time([lambda: (made.append(0), time.sleep(0.001)), lambda: (made.append(1), time.sleep(0.003))])
    assert timed.how == "host"
    assert 0.002 <= timed.seconds < 1.0  # seconds; milliseconds would be 2 or more
    assert made[:4] == [0, 1, 0, 1]


def test_ceilings_are_of_this_machine() -> None:
    found = measured_ceilings(CPU, torch.float32)
    assert 1e8 < found.read < 1e13
    assert 1e8 < found.copy < 1e13
    assert 1e8 < found.operations < 1e14
