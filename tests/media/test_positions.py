"""Rotary positions of prompts with media equal those that are counted token by token."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.interfaces.media import PlaceholderRun
from frame.media.positions import compute_positions
from tests.media.media_rig import make_item, positions_of


@pytest.mark.parametrize(
    "runs",
    [
        [PlaceholderRun(0, 6, (1, 2, 3))],
        [PlaceholderRun(3, 5)],  # positions as those of text
        [PlaceholderRun(2, 12, (3, 2, 2), 2.5), PlaceholderRun(14, 3), PlaceholderRun(20, 8, (1, 1, 8))],
        [PlaceholderRun(1, 4, (4, 1, 1), 0.3), PlaceholderRun(6, 6, (1, 6, 1))],
    ],
)
def test_positions_equal_those_counted_one_by_one(runs: list[PlaceholderRun]) -> None:
    positions, offset = compute_positions(runs)
    end = runs[-1].start + runs[-1].count
    expected = positions_of([make_item("x", *runs)], end + 1)
    assert positions.dtype == np.int32
    assert positions.tolist() == expected[:, :end].tolist()
    assert offset == expected[0, end] - end


def test_frames_are_rounded_down_in_float32() -> None:
    """As `torch.arange(frames) * step`, which the models were trained with."""
    import torch

    step = 1.9999999
    positions, _ = compute_positions([PlaceholderRun(0, 40, (40, 1, 1), step)])
    assert positions[0].tolist() == (torch.arange(40) * step).long().tolist()
