"""Scores of frame-tiny under parallel plans."""

from __future__ import annotations

from typing import Any

import pytest

from frame import Engine
from frame.entrypoints.cli.eval import EngineBackend
from frame.entrypoints.tools.eval.evaluate import evaluate
from frame.entrypoints.tools.eval.tasks import TASKS

PLANS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "dp": 2, "enable_dp_attention": True, "moe_dispatcher": "all_gather_reduce_scatter"},
)


@pytest.mark.soak
async def test_plans_change_no_score() -> None:
    scores = []
    for plan in ({}, *PLANS):
        with Engine(model="frame-tiny", dtype="float32", device="cpu", threads=1, **plan) as engine:
            report = await evaluate(EngineBackend(engine), TASKS, samples=10, seed=0, concurrency=32)
        scores.append({name: (task["correct"], task["errors"]) for name, task in report.to_json()["tasks"].items()})
    assert scores == [scores[0]] * len(scores)
    assert sum(correct for correct, _ in scores[0].values()) > 10
