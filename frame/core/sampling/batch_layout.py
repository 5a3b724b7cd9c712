"""The layout of a batch: indices of its tokens and of the tokens that need logits.

Used by the input batch and the sampling plans. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Token and row indices of one step. All arrays are int64."""

    num_tokens: int
    query_starts: np.ndarray  # [rows + 1]; row r computes tokens `query_starts[r]` to `query_starts[r + 1]` (excluded)
    seq_lens: np.ndarray  # [rows]; cached tokens after this step
    sampling_rows: np.ndarray  # [sampling rows]; indices of the rows that sample a token
    prompt_logprob_rows: np.ndarray  # [n]; indices of the rows that need the log-probabilities of their own tokens
    logits_indices: np.ndarray  # [sampling rows + tokens of `prompt_logprob_rows`]; tokens that need logits


def compute_layout(batch: ScheduledBatch) -> BatchLayout:
    """The layout of a batch. Tokens that need logits: the last of each sampling row, then all of
    each prompt-logprob row."""
    rows = len(batch.slots)
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(batch.num_scheduled, out=starts[1:])
    seq_lens = np.add(batch.num_computed, batch.num_scheduled, dtype=np.int64)
    sampling = np.flatnonzero(batch.samples)
    logits = starts[1:][sampling] - 1
    prompt_rows = np.flatnonzero(batch.prompt_logprobs) if batch.prompt_logprobs is not None else sampling[:0]
    if len(prompt_rows):
        logits = np.concatenate([logits, *(np.arange(starts[row], starts[row + 1]) for row in prompt_rows)])
    return BatchLayout(int(starts[-1]), starts, seq_lens, sampling, prompt_rows, logits)
