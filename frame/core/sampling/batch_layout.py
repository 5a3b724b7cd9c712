"""The layout of a batch: where its tokens are, which of them need logits, and the trees of its
drafted tokens.

Used by the input batch and the plans of a step. Imports no torch. Must not know a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch

A = TypeVar("A")  # np.ndarray on the host, torch.Tensor on the device


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Token, row and sample indices of a step (samples: see `StepResult`). All arrays are int64."""

    num_tokens: int
    slots: np.ndarray  # [rows]; request slots
    token_slots: np.ndarray  # [tokens]; the request slot of each token
    places: np.ndarray  # [tokens]; the place in its sequence that each token is stored at
    positions: np.ndarray  # [tokens]; as `places`, except for tokens of trees
    query_starts: np.ndarray  # [rows + 1]; row r computes tokens `query_starts[r]` to `query_starts[r + 1]` (excluded)
    seq_lens: np.ndarray  # [rows]; cached tokens after this step
    sample_rows: np.ndarray  # [samples]; the row of each sample
    sample_slots: np.ndarray  # [samples]; the request slot of each sample
    sample_positions: np.ndarray  # [samples]; position of the sampled token in its sequence
    prompt_logprob_rows: np.ndarray  # [n]; indices of the rows that need the log-probabilities of their own tokens
    logits_indices: np.ndarray  # [samples + tokens of `prompt_logprob_rows`]; tokens that need logits
    drafts: DraftLayout | None = None  # None: no row has a draft

    def order_samples(self) -> np.ndarray:
        """The step's tokens, those that samples are drawn from first, int64 [tokens]."""
        is_inner = np.ones(self.num_tokens, bool)
        is_inner[self.logits_indices] = False
        return np.concatenate((self.logits_indices, np.flatnonzero(is_inner)))


@dataclass(slots=True)
class DraftTrees(Generic[A]):
    """The trees of the sampling rows; `width` is the maximum number of nodes of a row. Chains are
    trees too.

    Node 0 of a row is its last token before the draft, node j its drafted token j. A token is
    stored at the place of its node, and has the position of its depth.
    """

    parents: A  # int64 [rows, width]; 0 for node 0 and beyond the row's nodes
    depths: A  # int64 [rows, width]; 0 for node 0 and beyond the row's nodes
    tokens: A  # int64 [rows, width]; the drafted token of each node; -2 for node 0 and beyond the row's nodes
    branches: A  # bool [rows, width, width]; [r, j, k]: node k > 0 is in the branch of node j; True beyond the row's nodes
    paths: A  # int32 [rows, width, width]; [r, j, d]: the node of depth d in node j's branch; d beyond its depth


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """The samples of a step with drafts. All arrays are int64."""

    rows: np.ndarray  # [sampling rows]; indices of the rows that sample
    num_samples: np.ndarray  # [sampling rows]; of each of these rows
    first: np.ndarray  # [sampling rows]; the first sample of each of these rows
    offsets: np.ndarray  # [samples]; number of samples of the same row before this one
    targets: np.ndarray  # [samples]; the drafted token that the sample is compared with; -1 for the last of a row
    sampling_rows: np.ndarray  # [samples]; the index of the sample's row in `rows`
    width: int  # maximum number of samples of a row
    trees: DraftTrees[np.ndarray] | None = None  # None: all drafts are chains, and each sample is compared with the next token
    bits: np.ndarray | None = None  # int32 [samples]; of trees: see `TreeMask`
    shifts: np.ndarray | None = None  # [samples]; by which the position of the sample's token is less than its place; None: 0


def compute_layout(batch: ScheduledBatch) -> BatchLayout:
    """The layout of a batch. Tokens that need logits: those of the samples, then all of each
    prompt-logprob row."""
    rows, slots = len(batch.slots), batch.slots.astype(np.int64)
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(batch.num_scheduled, out=starts[1:])
    num_tokens = int(starts[-1])
    token_slots, places = slots, batch.num_computed.astype(np.int64)
    seq_lens = places + batch.num_scheduled
    if num_tokens != rows:
        token_slots = np.repeat(slots, batch.num_scheduled)
        places = np.arange(num_tokens) + np.repeat(places - starts[:-1], batch.num_scheduled)
    sampling, positions = batch.samples.nonzero()[0], places
    logits, sample_positions, drafts = starts[1:][sampling] - 1, seq_lens[sampling], None
    if batch.num_drafts is not None:
        drafts = _compute_drafts(batch, starts, sampling, batch.num_drafts[sampling].astype(np.int64))
        behind = drafts.num_samples[drafts.sampling_rows] - 1 - drafts.offsets  # samples of the row after this one
        sampling = sampling[drafts.sampling_rows]
        logits, sample_positions = starts[1:][sampling] - 1 - behind, seq_lens[sampling] - behind
        if drafts.shifts is not None:
            positions = places.copy()
            positions[logits] -= drafts.shifts
            sample_positions = sample_positions - drafts.shifts
    prompt_rows = np.flatnonzero(batch.prompt_logprobs) if batch.prompt_logprobs is not None else sampling[:0]
    if len(prompt_rows):
        logits = np.concatenate([logits, *(np.arange(starts[row], starts[row + 1]) for row in prompt_rows)])
    return BatchLayout(
        num_tokens=num_tokens,
        slots=slots,
        token_slots=token_slots,
        places=places,
        positions=positions,
        query_starts=starts,
        seq_lens=seq_lens,
        sample_rows=sampling,
        sample_slots=slots[sampling],
        sample_positions=sample_positions,
        prompt_logprob_rows=prompt_rows,
        logits_indices=logits,
        drafts=drafts,
    )


def _compute_drafts(batch: ScheduledBatch, starts: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> DraftLayout:
    """`counts`: the drafted tokens of these rows, which are the last tokens of each."""
    num_samples = counts + 1
    first = np.cumsum(num_samples) - num_samples
    offsets = np.arange(int(num_samples.sum())) - np.repeat(first, num_samples)
    targets = np.full(len(offsets), -1, np.int64)
    is_drafted = offsets < np.repeat(counts, num_samples)
    row_of_target = np.repeat(rows, counts)
    # the token ids of a batch leave out its decodes, which come first
    indices = starts[1:][row_of_target] - np.repeat(counts, counts) + offsets[is_drafted] - batch.num_decodes
    targets[is_drafted] = batch.token_ids[indices]
    sampling_rows, width = np.repeat(np.arange(len(rows)), num_samples), int(num_samples.max(initial=1))
    if batch.draft_parents is None:
        return DraftLayout(rows, num_samples, first, offsets, targets, sampling_rows, width)
    trees, bits = build_trees(batch.draft_parents, targets[is_drafted], num_samples, offsets)
    cells = sampling_rows, offsets
    shifts = offsets - trees.depths[cells]
    return DraftLayout(rows, num_samples, first, offsets, targets, sampling_rows, width, trees, bits[cells], shifts)


def build_trees(
    parents: np.ndarray, token_ids: np.ndarray, num_samples: np.ndarray, offsets: np.ndarray
) -> tuple[DraftTrees[np.ndarray], np.ndarray]:
    """parents, token_ids: those of all drafts, row by row. num_samples, offsets: as in
    `DraftLayout`. -> the trees, and the bits of `TreeMask` of their nodes, int32 [rows, width]."""
    rows, width = len(num_samples), int(num_samples.max(initial=1))
    cells = (np.repeat(np.arange(rows), num_samples) * width + offsets)[offsets > 0]
    trees = DraftTrees(
        parents=np.zeros((rows, width), np.int64),
        depths=np.zeros((rows, width), np.int64),
        tokens=np.full((rows, width), -2, np.int64),
        branches=np.zeros((rows, width, width), bool),
        paths=np.tile(np.arange(width, dtype=np.int32), (rows, width, 1)),
    )
    bits = np.full((rows, width), -1, np.int32)
    trees.parents.reshape(-1)[cells] = parents
    trees.tokens.reshape(-1)[cells] = token_ids
    every = np.arange(rows)
    for node in range(1, width):  # a parent comes before its children
        parent = trees.parents[:, node]
        trees.depths[:, node] = depths = trees.depths[every, parent] + 1
        for each in (trees.branches, trees.paths):
            each[:, node] = each[every, parent]
        trees.branches[:, node, node] = True
        trees.paths[every, node, depths] = node
        # a token sees what its parent sees, the parent at a greater distance, and itself
        bits[:, node] = (bits[every, parent] << (node - parent)) | 1
    beyond = np.arange(width) >= num_samples[:, None]
    trees.depths[beyond] = 0
    trees.branches[beyond] = True
    return trees, bits
