"""The layout of a batch: indices of its tokens and of the tokens that need logits.

Used by the input batch and the sampling plans. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from frame.core.sampling.draft_trees import DraftTrees, build_trees

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Token, row and sample indices of one step (samples: see `StepResult`). All arrays are
    int64."""

    num_tokens: int
    query_starts: np.ndarray  # [rows + 1]; row r computes tokens `query_starts[r]` to `query_starts[r + 1]` (excluded)
    seq_lens: np.ndarray  # [rows]; cached tokens after this step
    sample_rows: np.ndarray  # [samples]; the row of each sample
    sample_positions: np.ndarray  # [samples]; position of the sampled token in its sequence
    prompt_logprob_rows: np.ndarray  # [n]; indices of the rows that need the log-probabilities of their own tokens
    logits_indices: np.ndarray  # [samples + tokens of `prompt_logprob_rows`]; tokens that need logits
    drafts: DraftLayout | None = None  # None: no row has a draft

    @property
    def has_trees(self) -> bool:
        return self.drafts is not None and self.drafts.trees is not None

    def find_positions(self, places: np.ndarray) -> np.ndarray:
        """The positions of tokens that are stored at these places of their sequences, both int64
        [tokens]."""
        if self.drafts is None or self.drafts.shifts is None:
            return places
        positions = places.copy()
        positions[self.logits_indices[: len(self.sample_rows)]] -= self.drafts.shifts
        return positions


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """The samples of a step with drafts. All arrays are int64."""

    rows: np.ndarray  # [sampling rows]; indices of the rows that sample
    num_samples: np.ndarray  # [sampling rows]; of each of these rows
    first: np.ndarray  # [sampling rows]; the first sample of each of these rows
    offsets: np.ndarray  # [samples]; number of samples of the same row before this one
    targets: np.ndarray  # [samples]; the drafted token that the sample is compared with; -1 for the last of a row
    trees: DraftTrees | None = None  # None: all drafts are chains, and the sample of each token is compared with the next one
    shifts: np.ndarray | None = None  # [samples]; by which the position of the sample's token is less than its place; None: 0


def compute_layout(batch: ScheduledBatch) -> BatchLayout:
    """The layout of a batch. Tokens that need logits: those of the samples, then all of each
    prompt-logprob row."""
    rows = len(batch.slots)
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(batch.num_scheduled, out=starts[1:])
    seq_lens = np.add(batch.num_computed, batch.num_scheduled, dtype=np.int64)
    sampling = np.flatnonzero(batch.samples)
    logits, positions, drafts = starts[1:][sampling] - 1, seq_lens[sampling], None
    if batch.num_drafts is not None:
        drafts = _compute_drafts(batch, starts, sampling, batch.num_drafts[sampling].astype(np.int64))
        behind = np.repeat(drafts.num_samples, drafts.num_samples) - 1 - drafts.offsets  # samples of the row after this one
        sampling = np.repeat(sampling, drafts.num_samples)
        logits, positions = starts[1:][sampling] - 1 - behind, seq_lens[sampling] - behind
        if drafts.shifts is not None:
            positions = positions - drafts.shifts
    prompt_rows = np.flatnonzero(batch.prompt_logprobs) if batch.prompt_logprobs is not None else sampling[:0]
    if len(prompt_rows):
        logits = np.concatenate([logits, *(np.arange(starts[row], starts[row + 1]) for row in prompt_rows)])
    return BatchLayout(int(starts[-1]), starts, seq_lens, sampling, positions, prompt_rows, logits, drafts)


def _compute_drafts(batch: ScheduledBatch, starts: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> DraftLayout:
    """`counts`: the drafted tokens of these rows, which are the last tokens of each."""
    num_samples = counts + 1
    first = np.cumsum(num_samples) - num_samples
    offsets = np.arange(int(num_samples.sum())) - np.repeat(first, num_samples)
    targets = np.full(len(offsets), -1, np.int64)
    is_drafted = offsets < np.repeat(counts, num_samples)
    row_of_target = np.repeat(rows, counts)
    # the token ids of a batch leave out its decodes, which come first
    places = starts[1:][row_of_target] - np.repeat(counts, counts) + offsets[is_drafted] - batch.num_decodes
    targets[is_drafted] = batch.token_ids[places]
    if batch.draft_parents is None:
        return DraftLayout(rows, num_samples, first, offsets, targets)
    trees = build_trees(batch.draft_parents, targets[is_drafted], num_samples, offsets)
    shifts = trees.shifts[np.repeat(np.arange(len(rows)), num_samples), offsets]
    return DraftLayout(rows, num_samples, first, offsets, targets, trees, shifts)
