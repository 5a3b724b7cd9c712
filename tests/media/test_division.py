"""The parts of a divided item, and what a step may encode."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.scheduling.running import StepPlan
from frame.interfaces.modality import EncoderCost, MediaPlan
from frame.media.division import TOKENS, Division, count_left, find_limit
from frame.media.row_table import RowTable
from tests.media.media_rig import make_item

COST = EncoderCost(num_layers=10, patch=2.0, pair=0.0)
MEDIA = MediaPlan(64, 5000, ("image", "audio"), costs={"image": COST})


def make_plan(num_decodes: int, limit: int = 8192, chunk: int = 0) -> StepPlan:
    plan = StepPlan(np.arange(num_decodes), limit=limit, budget=limit - chunk)
    if chunk:
        plan.chunks.append((None, 0, chunk))  # type: ignore[arg-type]
    return plan


@pytest.mark.parametrize(
    ("num_decodes", "modality", "limit", "patches"),
    [(0, "image", 8192, 5000), (1, "image", 8192, TOKENS // 2), (1, "image", 300, 150), (1, "audio", 8192, 5000)],
)
def test_patches_that_a_step_encodes_at_most(num_decodes: int, modality: str, limit: int, patches: int) -> None:
    assert find_limit(MEDIA, modality, make_plan(num_decodes, limit)) == patches


def test_what_prompts_and_whole_items_leave() -> None:
    assert count_left(make_plan(1), 0.0) == TOKENS
    assert count_left(make_plan(1, chunk=1000), 48.0) == TOKENS - 1048
    assert count_left(make_plan(1, chunk=8000), 0.0) == TOKENS / 4
    assert count_left(make_plan(1, limit=400), 0.0) == 400


@pytest.mark.parametrize(("tokens", "budget", "layers"), [(60.0, 99, 3), (5.0, 99, 1), (1000.0, 100, 10), (60.0, 20, 2)])
def test_layers_follow_each_other(tokens: float, budget: int, layers: int) -> None:
    """200 tokens in ten layers; a budget of 20 of the 100 patches is a fifth of them."""
    item = make_item("x", patches=100)
    division = Division(item, RowTable(64).acquire(("", "image", item.digest), 4), COST)
    seen, costs = [0], list[float]()
    while not division.is_complete:
        order, cost = division.order_layers(tokens, budget)
        assert order.first_layer == seen[-1]
        seen.append(order.stop_layer or 10)
        costs.append(cost)
    assert seen == [*range(0, 10, layers), 10]
    assert sum(costs) == pytest.approx(200)
