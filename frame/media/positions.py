"""Rotary positions of prompts with media (M-RoPE, arXiv 2409.12191).

A run of placeholders with a grid has the positions of its frame, row and column, counted from the
position that the run's first token would have as text. The next token follows the largest of them.
Used by `PromptLayout`. Must not know a request or a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frame.core.interfaces.media import PlaceholderRun


def compute_positions(runs: Sequence[PlaceholderRun]) -> tuple[np.ndarray, int]:
    """runs: of all items, ascending. -> the positions of all tokens up to the last placeholder,
    int32 [3, tokens], and the offset of all later ones: the position less the place in the
    sequence."""
    starts, counts = (np.array([getattr(run, name) for run in runs], np.int64) for name in ("start", "count"))
    frames, heights, widths = np.array([run.grid for run in runs], np.int64).T
    steps = np.array([run.frame_step for run in runs], np.float32)
    has_grid = frames > 0
    last_frames = _scale(frames - 1, steps)  # of runs with a grid
    advances = np.where(has_grid, 1 + np.maximum(last_frames, np.maximum(heights, widths) - 1), counts)
    ends = starts + counts
    deltas = np.zeros(int(ends[-1]) + 1, np.int64)
    deltas[ends] = advances - counts
    shifts = np.cumsum(deltas)
    positions = np.repeat((np.arange(int(ends[-1])) + shifts[:-1])[None], 3, axis=0)
    runs_of = np.repeat(np.flatnonzero(has_grid), counts[has_grid])  # of each placeholder with a grid
    firsts = np.cumsum(counts[has_grid]) - counts[has_grid]
    within = np.arange(len(runs_of)) - np.repeat(firsts, counts[has_grid])
    areas = (heights * widths)[runs_of]
    bases, places = (starts + shifts[starts])[runs_of], starts[runs_of] + within
    positions[0, places] = bases + _scale(within // areas, steps[runs_of])
    positions[1, places] = bases + within % areas // widths[runs_of]
    positions[2, places] = bases + within % widths[runs_of]
    return positions.astype(np.int32), int(shifts[-1])


def _scale(frames: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Positions of frames, rounded down; in float32, as the models were trained."""
    return (frames.astype(np.float32) * steps).astype(np.int64)
