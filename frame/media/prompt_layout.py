"""`PromptLayout`: where the items of a request are in its prompt, as arrays.

Made once for each request, by `MediaScheduler`, and read for each chunk. Must not know the table or
a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from frame.core.interfaces.media import MediaItem
from frame.media.cache_keys import ItemName
from frame.media.positions import compute_positions
from frame.media.row_table import TableItem


@dataclass(slots=True, eq=False)
class PromptLayout:
    """Arrays by item are int64 [items], arrays by token [tokens up to the last placeholder]."""

    items: Sequence[MediaItem]
    names: list[ItemName]
    starts: np.ndarray  # by item: its first placeholder
    ends: np.ndarray  # by item: the token after its last placeholder
    run_starts: np.ndarray  # int64 [runs of all items]
    run_ends: np.ndarray
    rows: np.ndarray  # int32, by token: the row of its item; -1: text
    spans: np.ndarray | None = None  # int32, by token: the end of its run; 0: text. None: tokens see those before them alone
    positions: np.ndarray | None = None  # int32 [3, tokens]; None: as those of text
    position_offset: int = 0
    held: dict[int, TableItem] = field(default_factory=dict)  # by item: what this step reads, or the request goes on reading
    last_read: int = -1  # the last step with placeholders of the request

    @property
    def end(self) -> int:
        """Tokens up to the last placeholder."""
        return len(self.rows)

    def find_items(self, start: int, end: int) -> range:
        """The items that have placeholders before and after, or in, [start, end)."""
        first = int(np.searchsorted(self.ends, start, "right"))
        return range(first, max(first, int(np.searchsorted(self.starts, end, "left"))))

    def find_run(self, token: int) -> tuple[int, int]:
        """Start and end of the run that a token is in; (token, token): it is in none."""
        index = int(np.searchsorted(self.run_ends, token, "right"))
        if index < len(self.run_starts) and self.run_starts[index] <= token:
            return int(self.run_starts[index]), int(self.run_ends[index])
        return token, token


def lay_out_prompt(
    prompt: np.ndarray, items: Sequence[MediaItem], names: list[ItemName], keys: Sequence[int], *, has_positions: bool, has_spans: bool
) -> tuple[PromptLayout, np.ndarray]:
    """items: checked, with runs. keys: one each. -> the layout, and the prompt with the keys in
    place of placeholders, int32."""
    runs = [run for item in items for run in item.runs]
    starts, counts = np.array([run.start for run in runs], np.int64), np.array([run.count for run in runs], np.int64)
    num_rows = np.array([item.num_rows for item in items], np.int64)
    total = int(num_rows.sum())
    every = np.arange(total)
    places = every + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    rows = np.full(int(starts[-1] + counts[-1]), -1, np.int32)
    rows[places] = every - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    prompt_keys = prompt.copy()
    prompt_keys[places] = np.repeat(np.array(keys, np.int32), num_rows)
    first_runs = np.cumsum([len(item.runs) for item in items]) - [len(item.runs) for item in items]
    last_runs = np.append(first_runs[1:], len(runs)) - 1
    layout = PromptLayout(items, names, starts[first_runs], (starts + counts)[last_runs], starts, starts + counts, rows)
    if has_spans:
        layout.spans = np.zeros_like(rows)
        is_causal = [item.modality == "audio" for item in items for _ in item.runs]
        layout.spans[places] = np.repeat(np.where(is_causal, 0, starts + counts), counts)
    if has_positions:
        layout.positions, layout.position_offset = compute_positions(runs)
    return layout, prompt_keys
