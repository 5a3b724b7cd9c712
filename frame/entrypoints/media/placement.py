"""Where prepared media stand in a prompt: their texts for the text process, and the items of a
request, from the prompt's token ids.

Used by the HTTP server and the offline engine. Must not know a modality or a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from frame.core.interfaces.media import MediaItem, PlaceholderRun
from frame.core.messages import MediaText, as_array
from frame.entrypoints.media.media_service import PreparedMedia

TEXT_GRID = (0, 0, 0)  # of a run with positions as those of text


class PlacementError(RuntimeError):
    """The prompt's tokens do not agree with the layout of its media: an error of a modality."""


def make_media_texts(items: Sequence[PreparedMedia]) -> list[MediaText]:
    """What the text process needs to know of the items."""
    return [MediaText(each.modality, each.placeholder, each.row_token, each.layout.expansion) for each in items]


def count_rows(item: PreparedMedia) -> int:
    """Tokens of the item that get a row."""
    return item.layout.expansion.count(item.row_token)


def place_items(
    ids: Sequence[int], items: Sequence[PreparedMedia], order: Sequence[int], find_token_id: Callable[[str], int | None]
) -> list[MediaItem]:
    """The items with their runs of placeholders, in the order of the prompt. order: the indices of
    `items` in that order. Raises PlacementError."""
    tokens = as_array(ids)
    left: dict[str, np.ndarray] = {}  # by row token: its indices in the prompt that are not taken yet
    for row_token in {each.row_token for each in items}:
        row_id = find_token_id(row_token)
        if row_id is None:
            raise PlacementError(f"the tokenizer has no token {row_token!r}")
        left[row_token] = np.flatnonzero(tokens == row_id)
    placed = []
    for index in order:
        item = items[index]
        runs, left[item.row_token] = _take_runs(item, left[item.row_token])
        placed.append(MediaItem(item.modality, item.digest, runs, item.layout.patches, item.path, item.arrays))
    for row_token, indices in left.items():
        if len(indices):
            raise PlacementError(f"the prompt has {len(indices)} tokens {row_token!r} more than its media have rows")
    return placed


def _take_runs(item: PreparedMedia, indices: np.ndarray) -> tuple[list[PlaceholderRun], np.ndarray]:
    """(the runs of an item, whose row tokens are the first of `indices`; the other indices)."""
    layout, size = item.layout, len(item.row_token)
    lengths = [len(run[0]) // size for run in re.finditer(f"(?:{re.escape(item.row_token)})+", layout.expansion)]
    grids = layout.grids or (TEXT_GRID,) * len(lengths)
    if len(grids) != len(lengths):
        raise PlacementError(f"the layout of a {item.modality} has {len(grids)} grids for {len(lengths)} runs")
    if sum(lengths) > len(indices):
        raise PlacementError(f"the prompt has {len(indices)} tokens {item.row_token!r} for {sum(lengths)} rows of a {item.modality}")
    runs, start = [], 0
    for length, grid in zip(lengths, grids, strict=True):
        first = int(indices[start])
        if int(indices[start + length - 1]) != first + length - 1:
            raise PlacementError(f"a run of {length} tokens {item.row_token!r} is split in the prompt")
        if grid != TEXT_GRID and grid[0] * grid[1] * grid[2] != length:
            raise PlacementError(f"the grid {grid} of a {item.modality} has not {length} rows")
        runs.append(PlaceholderRun(first, length, grid, layout.frame_step))
        start += length
    return runs, indices[start:]
