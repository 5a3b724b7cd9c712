"""The GRPO loop raises its reward."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.mark.slow
def test_the_reward_rises() -> None:
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rewards = example.train(8, learning_rate=6e-3)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.3
