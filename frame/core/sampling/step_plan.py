"""The host's plans of one step: what is sampled, verified, drafted and still pending, with the
arrays that each of them reads on the device.

`SamplingPlanner` makes them for the input batch; the model runner, the verification and the draft
runner carry them out. A dataclass of arrays exists twice: of numpy arrays in a plan, and of tensors
once they are on the device. Must not know a drafter, a request or a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np

from frame.core.sampling.batch_layout import A
from frame.core.sampling.prompt_logprobs import plan_prompts
from frame.core.sampling.sampling_metadata import SamplingArrays

if TYPE_CHECKING:
    from frame.core.interfaces.batch import DraftOrder, ScheduledBatch
    from frame.core.kv_cache.kv_pool import DeviceTable, PageTable
    from frame.core.sampling.batch_layout import BatchLayout, DraftLayout, DraftTrees
    from frame.core.sampling.logits_pipeline import ProcessorPlan, Processors
    from frame.core.sampling.prompt_logprobs import PromptPlan
    from frame.core.sampling.sampling_metadata import SamplingPlan, SamplingTable

# (slots, positions, targets, -1: none) -> which samples are replaced by their drafted token, int64
# [samples], 1 or 0; without it, drafts are compared with what is drawn
ChooseAccepted = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(slots=True)
class VerificationArrays(Generic[A]):
    """The samples of a step and the drafts that they are compared with. int64 unless said
    otherwise."""

    cells: A  # [samples]; sampling row * width + offset of the sample in its row
    targets: A  # [samples]; the drafted token, -1 for the last sample of a row
    first: A  # [sampling rows]; the first sample of the row
    slots: A  # [sampling rows]; request slots
    chosen: A | None = None  # [samples]; see `ChooseAccepted`; None without one
    trees: DraftTrees[A] | None = None  # None: all drafts are chains, or only the device has the trees yet
    bits: A | None = None  # int32 [tokens]; of trees: see `TreeMask`


@dataclass(frozen=True, slots=True)
class VerificationPlan:
    """The comparison of one step's samples with the drafts."""

    num_rows: int
    width: int  # maximum number of samples of a row
    arrays: VerificationArrays[np.ndarray]


@dataclass(slots=True)
class DraftingArrays(Generic[A]):
    """What a device drafter reads. Rows are the sampling rows; int64 unless said otherwise."""

    next_ids: A  # [tokens]; the token after each token, where the host has it
    samples: A  # [samples]; the token that each sample is drawn from
    first: A  # [rows]; the first sample of the row
    positions: A  # [rows]; the position of the first sample
    slots: A  # [rows]; request slots
    limits: A  # [rows]; tokens that the pages of the row hold
    temperature: A | None = None  # float32 [rows]; 0: greedy; None: nothing is drafted
    key: A | None = None  # [rows, width + num_tokens]; keys of the draws from position + 1 on
    places: A | None = None  # [samples]; of trees: places of the samples' tokens
    columns: A | None = None  # [rows]; accepted tokens of the step before, which the device alone has; None: 0


@dataclass(frozen=True, slots=True)
class DraftingPlan:
    """The work of a device drafter after one step."""

    num_tokens: int  # to draft for each row
    num_drawn: int  # rows with a temperature above 0
    width: int  # maximum number of samples of a row, and of tokens by which its positions may be greater
    arrays: DraftingArrays[np.ndarray]


@dataclass(slots=True)
class PendingKeys(Generic[A]):
    """The keys of the draws of rows whose positions the device alone has. int64."""

    samples: A  # [samples]; request slots
    keys: A  # [sampling rows, n]; from the row's first sample on
    cells: A  # [samples]; the cell of the sample's key in `keys`, if no token is accepted


@dataclass(slots=True)
class PendingArrays(Generic[A]):
    """What `PendingRows` reads. int64 unless said otherwise."""

    # of a step with drafts
    sources: A | None = None  # [tokens of rows with drafts]; index of the token in the last-token table
    targets: A | None = None  # [samples]; the same of the drafted token that a sample is compared with
    # of a step with rows that may be longer
    tokens: A | None = None  # [tokens]; request slots
    kv_slots: tuple[A, ...] = ()  # of each page table, [tokens, width + 1]; the KV slot after so many accepted tokens
    chosen: A | None = None  # [samples, width + 1]; see `ChooseAccepted`, as above
    # of either, where the draws or the trees depend on the step before
    keys: PendingKeys[A] | None = None
    nodes: A | None = None  # of trees: bool [sampling rows, samples of a row]; whether the row has the node
    places: A | None = None  # of trees: [samples]; the token that the sample is drawn from


@dataclass(frozen=True, slots=True)
class PendingPlan:
    """The plan of a step with drafts of which the device alone has the ids, or rows whose lengths
    the step in flight decides."""

    width: int  # maximum number of tokens by which a row may be longer; 0: all lengths are known
    arrays: PendingArrays[np.ndarray]


@dataclass(slots=True)
class RoundArrays(Generic[A]):
    """The samples of a round, and their sampling rows, int64 [n]."""

    sampling: SamplingArrays[A]
    samples: A
    rows: A


@dataclass(frozen=True, slots=True)
class SampleRound:
    """The samples of one offset in their rows; of trees, one sample of each row at one depth, in
    place of the one that the device chooses."""

    sampling: SamplingPlan
    processing: ProcessorPlan | None
    arrays: RoundArrays[np.ndarray]


@dataclass(slots=True)
class StepArrays(Generic[A]):
    """What a step reads on the device beside the forward batch. None: the step has no such work."""

    sampling: SamplingArrays[A] | None = None
    prompt_targets: A | None = None  # see `PromptPlan`
    verification: VerificationArrays[A] | None = None
    rounds: tuple[RoundArrays[A], ...] = ()
    drafting: DraftingArrays[A] | None = None
    pending: PendingArrays[A] | None = None
    token_types: A | None = None  # of pooling: see `TokenTypes`


@dataclass(slots=True)
class StepPlans:
    """The host's plans of one step. `arrays` are those of the plans."""

    arrays: StepArrays[np.ndarray]  # without those of the sampler where a decode graph draws the tokens
    sampling: SamplingPlan
    processing: ProcessorPlan | None  # None: no row uses a logits processor, or the step has rounds
    prompts: PromptPlan | None = None  # None: no row needs prompt log-probabilities
    verification: VerificationPlan | None = None  # None: no row has a draft
    rounds: tuple[SampleRound, ...] = ()  # of a step with drafts and logits processors
    drafting: DraftingPlan | None = None  # None: there is no device drafter
    pending: PendingPlan | None = None  # None: the host has all ids and lengths


class SamplingPlanner:
    """Plans the steps of one runner, in launch order.

    choose_accepted: of benchmarks, set by the builder; None: drafts are compared with draws.
    """

    def __init__(self, sampling: SamplingTable, processors: Processors, table: DeviceTable, windows: Sequence[PageTable]) -> None:
        """windows: the page tables of the `window` groups."""
        self._sampling = sampling
        self._processors = processors
        self._table = table
        self._page_tables = (table, *windows)
        self.choose_accepted: ChooseAccepted | None = None

    def update_slots(self, batch: ScheduledBatch) -> None:
        """Set up and release slots: all that a batch without rows does."""
        self._sampling.update(batch.setups, batch.released)
        self._processors.update(batch.setups, batch.released)

    def plan(self, batch: ScheduledBatch, layout: BatchLayout, *, is_replay: bool, draws: bool) -> StepPlans:
        """Set up and release slots, and plan the step. The page tables must have the batch's pages
        if it has pending rows. is_replay: a decode graph runs the step; draws: and draws the tokens
        where it can."""
        processing = self._processors.begin_step(batch, layout)
        sampling = self._sampling.begin_step(batch, layout, draws=draws and processing is None)
        plans = StepPlans(StepArrays(), sampling, processing)
        arrays = plans.arrays
        if len(layout.prompt_logprob_rows):
            plans.prompts = plan_prompts(batch, layout, self._sampling)
            arrays.prompt_targets = plans.prompts.targets
        if layout.drafts is not None:
            plans.verification = plan_verification(layout, layout.drafts)
            arrays.verification = plans.verification.arrays
            if self.choose_accepted is not None:
                arrays.verification.chosen = self.choose_accepted(layout.sample_slots, layout.sample_positions, layout.drafts.targets)
            if processing is not None:
                rounds = self._plan_rounds(layout, layout.drafts, batch.grammar_mask)
                if batch.num_pending is not None and self._table.tree_depth:
                    rounds = rounds[: self._table.tree_depth + 1]
                plans.processing, plans.rounds = None, tuple(rounds)
                arrays.rounds = tuple(each.arrays for each in rounds)
        if not sampling.draws:
            arrays.sampling = sampling.arrays
            arrays.sampling.processing = None if plans.processing is None else plans.processing.arrays
            if is_replay or layout.drafts is not None or len(layout.sample_slots) != len(batch.slots):
                arrays.sampling.slots = layout.sample_slots
        if batch.num_pending is not None:
            plans.pending = self._plan_pending(batch, batch.num_pending, layout)
            arrays.pending = plans.pending.arrays
        if batch.draft_order is not None:
            more = 0 if plans.pending is None else plans.pending.width
            plans.drafting = plan_drafting(batch, batch.draft_order, layout, self._sampling, more)
            arrays.drafting = plans.drafting.arrays
        if arrays.pending is not None and arrays.pending.nodes is not None:  # as of tokens that are all in one branch
            if arrays.verification is not None:
                arrays.verification.bits = np.full(layout.num_tokens, -1, np.int32)
            if arrays.drafting is not None:
                arrays.drafting.places = layout.sample_positions - 1
        return plans

    def _plan_rounds(self, layout: BatchLayout, drafts: DraftLayout, mask: np.ndarray | None) -> list[SampleRound]:
        """The rounds of a step with drafts whose rows use logits processors: what a processor does
        to a token's logits may depend on the tokens before it, so the samples of a row are drawn in
        order. mask: int32 [samples, words], or None."""
        rows, slots = drafts.sampling_rows, layout.sample_slots
        rounds, depths = [], drafts.offsets if drafts.shifts is None else drafts.offsets - drafts.shifts
        for offset in range(int(depths.max(initial=-1)) + 1):
            samples = np.flatnonzero(depths == offset)
            samples = samples[np.unique(rows[samples], return_index=True)[1]]
            positions = layout.sample_positions[samples]
            sampling = self._sampling.plan_samples(slots[samples], positions, None if mask is None else mask[samples])
            processing = self._processors.plan(slots[samples], positions)
            sampling.arrays.logprob_rows = sampling.arrays.listed_ids = None  # those of all rounds are computed at the end
            sampling.arrays.slots = slots[samples]
            sampling.arrays.processing = None if processing is None else processing.arrays
            rounds.append(SampleRound(sampling, processing, RoundArrays(sampling.arrays, samples, rows[samples])))
        return rounds

    def _plan_pending(self, batch: ScheduledBatch, counts: np.ndarray, layout: BatchLayout) -> PendingPlan:
        """The plan of a batch with its minimum lengths, of which each row may have so many tokens
        more."""
        width, drafts = int(counts.max(initial=0)), layout.drafts
        arrays = PendingArrays[np.ndarray]()
        if drafts is not None and batch.num_drafts is not None:
            arrays.sources, arrays.targets = self._locate_drafts(batch.num_drafts, layout, drafts)
        if width:
            more = np.arange(width + 1)
            reached = np.minimum(more[:, None], np.repeat(counts, batch.num_scheduled))
            arrays.tokens = layout.token_slots
            arrays.kv_slots = tuple(
                np.stack([table.find_kv_slots(batch, layout.token_slots, layout.places + each) for each in reached], 1)
                for table in self._page_tables
            )
            if self.choose_accepted is not None and drafts is not None:
                positions = (layout.sample_positions + each for each in more)
                arrays.chosen = np.stack([self.choose_accepted(layout.sample_slots, each, drafts.targets) for each in positions], 1)
        if self._table.tree_depth and drafts is not None:
            arrays.nodes = np.arange(drafts.width) < drafts.num_samples[:, None]
            arrays.places = layout.logits_indices[: len(layout.sample_rows)]
        if width or arrays.nodes is not None:
            arrays.keys = self._plan_keys(layout, width)
        return PendingPlan(width, arrays)

    def _locate_drafts(self, num_drafts: np.ndarray, layout: BatchLayout, drafts: DraftLayout) -> tuple[np.ndarray, np.ndarray]:
        """Where the last-token table has the ids of the rows with drafts: `sources` and `targets`
        of `PendingArrays`."""
        table, samples = self._table, layout.sample_slots
        cells = table.first_drafted + samples * table.drafts.shape[1] + drafts.offsets
        has_draft = np.repeat(num_drafts[drafts.rows] > 0, drafts.num_samples)
        sources = np.where(drafts.offsets == 0, samples, cells - 1)[has_draft]
        return sources, np.where(drafts.targets < 0, len(table.last_token) - 1, cells)

    def _plan_keys(self, layout: BatchLayout, width: int) -> PendingKeys[np.ndarray]:
        drafts, samples = layout.drafts, layout.sample_slots
        first = rows = np.arange(len(samples))
        offsets = np.zeros_like(first)
        if drafts is not None:
            first, rows, offsets = drafts.first, drafts.sampling_rows, drafts.offsets
        count = int(offsets.max(initial=0)) + 1 + width
        _, keys = self._sampling.plan_drafts(samples[first], layout.sample_positions[first], count)
        return PendingKeys(samples, keys, rows * count + offsets)


def plan_verification(layout: BatchLayout, drafts: DraftLayout) -> VerificationPlan:
    """drafts: those of the layout."""
    slots, rows, width = layout.sample_slots[drafts.first], drafts.sampling_rows, drafts.width
    arrays = VerificationArrays(rows * width + drafts.offsets, drafts.targets, drafts.first, slots, trees=drafts.trees)
    if drafts.bits is not None:
        arrays.bits = np.full(layout.num_tokens, -1, np.int32)
        arrays.bits[layout.logits_indices[: len(rows)]] = drafts.bits
    return VerificationPlan(len(drafts.rows), width, arrays)


def plan_drafting(batch: ScheduledBatch, order: DraftOrder, layout: BatchLayout, table: SamplingTable, more: int = 0) -> DraftingPlan:
    """The plan of a step with this order. more: tokens by which the positions may be greater."""
    drafts, rows, width = layout.drafts, layout.sample_rows, 1
    first = np.arange(len(rows))
    if drafts is not None:
        rows, first, width = drafts.rows, drafts.first, drafts.width
    next_ids = np.zeros(layout.num_tokens, np.int64)
    next_ids[batch.num_decodes : -1] = batch.token_ids[1:]
    next_ids[layout.query_starts[1:] - 1] = order.next_tokens
    arrays = DraftingArrays(
        next_ids=next_ids,
        samples=layout.logits_indices[: len(layout.sample_rows)],
        first=first,
        positions=layout.sample_positions[first],
        slots=layout.slots[rows],
        limits=order.limits[rows].astype(np.int64),
    )
    width, num_drawn = width + more, 0
    if order.num_tokens:
        arrays.temperature, arrays.key = table.plan_drafts(arrays.slots, arrays.positions + 1, width + order.num_tokens - 1)
        num_drawn = int(np.count_nonzero(arrays.temperature))
    if drafts is not None and drafts.shifts is not None:
        arrays.places = layout.sample_positions + drafts.shifts - 1
    return DraftingPlan(order.num_tokens if len(rows) else 0, num_drawn, width, arrays)
