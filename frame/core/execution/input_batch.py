"""`InputBatch`: turns each `ScheduledBatch` into the inputs of the forward pass, the CUDA graphs
and the sampler.

Used by the model runners and the CUDA graphs. Keeps the state that outlives a step: the page table,
last tokens, sampling parameters and the slots of the logits processors. A step's host arrays move
to the device in one copy. Must not know a request, a model or the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from frame.core.execution.pending_rows import PendingPlan, PendingRows, shorten_rows
from frame.core.execution.staging import make_staging
from frame.core.interfaces.batch import ForwardBatch, HostView, SelectedTokens
from frame.core.interfaces.runner import MAX_SINGLE_TOKEN_ROWS
from frame.core.kv_cache.group_inputs import GroupInputs
from frame.core.kv_cache.kv_pool import GIVEN_TOKENS, DeviceTable, KVPool
from frame.core.sampling.batch_layout import BatchLayout, compute_layout
from frame.core.sampling.draft_plan import plan_drafting
from frame.core.sampling.prompt_logprobs import plan_prompts
from frame.core.sampling.sampling_metadata import SamplingTable, grammar_arrays
from frame.core.sampling.verification import make_extensions, plan_rounds, plan_verification

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.batch import KVCache, ScheduledBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.sampling.draft_plan import DraftingPlan
    from frame.core.sampling.logits_pipeline import ProcessorPlan
    from frame.core.sampling.prompt_logprobs import PromptPlan
    from frame.core.sampling.sampler import Sampler
    from frame.core.sampling.sampling_metadata import SamplingPlan
    from frame.core.sampling.verification import ChooseAccepted, SampleRound, VerificationPlan

TOKEN_ARRAYS = ("token_ids", "positions", "kv_slots")

_MAX_PROMPT_KEYS = 16_384  # keys that the prompt tokens of a decode graph may read in total, without `shared_prefixes`
_STAGED_BYTES_PER_TOKEN = 3 * 8
_STAGED_BYTES_PER_ROW = 256


class TokenPlacement(Protocol):
    """Fixed device addresses for the token arrays of a step, as piecewise graphs need them."""

    @property
    def maximum(self) -> int:
        """The largest number of tokens that has a place."""
        ...

    def place(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copies `TOKEN_ARRAYS` to their addresses. -> tensors of the same names and lengths on the
        device."""
        ...

    def extensions(self, tokens: int) -> dict[type, Any]:
        """The extensions of a `ForwardBatch` of this many tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A step's tokens as rows of one token each, the sampled ones first, for a decode graph. All
    int64 [tokens]."""

    slots: np.ndarray
    positions: np.ndarray
    sources: np.ndarray  # index of the row's token id in the last-token table
    drawn: np.ndarray  # index in the last-token table that the drawn token is written to
    kv_slots: np.ndarray
    num_sampling: int
    places: Mapping[str, np.ndarray]  # `GroupInputs.find_places`; empty for a model with one cache group
    pending: int = 0  # tokens by which lengths and positions may be greater
    trees: TreeRows | None = None  # None: no row is a token of a tree


@dataclass(frozen=True, slots=True)
class TreeRows:
    """What differs in `TokenRows` of a step with trees, whose `positions` are places."""

    positions: np.ndarray  # int64 [tokens]
    bits: np.ndarray  # int32 [tokens]; see `TreeMask`


@dataclass(slots=True)
class StepPlans:
    """The host's plans of one step; the values of their arrays travel to the device as extra
    inputs."""

    sampling: SamplingPlan
    processing: ProcessorPlan | None  # None: no row uses a logits processor
    prompts: PromptPlan | None  # None: no row needs prompt log-probabilities
    verification: VerificationPlan | None = None  # None: no row has a draft
    rounds: tuple[SampleRound, ...] = ()  # of a step with drafts and logits processors, whose `processing` is None
    drafting: DraftingPlan | None = None  # None: there is no device drafter
    pending: PendingPlan | None = None  # None: the host has all ids and lengths

    def later_inputs(self) -> dict[str, np.ndarray]:
        """The arrays that the verification, the device drafter and `PendingRows` read on the
        device, by name."""
        plans = (self.verification, self.drafting, self.pending)
        return {name: array for plan in plans if plan is not None for name, array in plan.arrays.items()}

    def extra_inputs(self) -> dict[str, np.ndarray]:
        """The arrays that the sampler, the logits processors, the prompt log-probabilities and
        `later_inputs` have, by name."""
        arrays = self.sampling.arrays
        if self.processing is not None:
            arrays = {**arrays, **self.processing.arrays}
        if self.prompts is not None:
            arrays = {**arrays, "prompt_targets": self.prompts.targets}
        if self.verification is not None or self.drafting is not None or self.pending is not None:
            arrays = {**arrays, **self.later_inputs()}
        for each in self.rounds:
            arrays = {**arrays, **each.arrays}
        return arrays


@dataclass(slots=True)
class ForwardInputs:
    """A step that runs the model's forward pass.

    tensors: the extra inputs by name, and "sampling_slots", int64 [samples]. logits_indices:
    int64 [n], the tokens whose hidden states are used; None: all that the forward returns, in
    order. is_placed: whether the token arrays are at the addresses of the `TokenPlacement`, so that
    its graphs run the step.
    """

    plans: StepPlans
    tensors: dict[str, torch.Tensor]
    batch: ForwardBatch
    logits_indices: torch.Tensor | None
    is_placed: bool


@dataclass(slots=True)
class ReplayInputs:
    """A step that a decode graph replays.

    tensors: as in `ForwardInputs`; where the graph draws the tokens, those of `later_inputs`
    alone. draws: parameters of the draw inside of the graph, one entry a sample; empty: the sampler
    draws from the graph's logits. is_masked: a graph draws under a deferred grammar mask. settle:
    changes the graph's inputs before its replay; None: nothing to change.
    """

    plans: StepPlans
    tensors: dict[str, torch.Tensor]
    rows: TokenRows
    draws: Mapping[str, np.ndarray]
    is_masked: bool
    resolve: Callable[[Mapping[str, torch.Tensor]], None] | None


StepInputs = ForwardInputs | ReplayInputs


class InputBatch:
    """The inputs of one runner. `prepare` once a step, in launch order, on the runner's stream and
    in inference mode.

    choose_accepted: of benchmarks; None: drafts are compared with what is drawn. The builder sets
    it.
    max_graph_rows: the largest batch that has a decode graph; 0: none has. The runner sets it.
    draws_masked: whether graphs draw under deferred grammar masks. The runner sets it.
    placement: the addresses of the piecewise graphs; None: there are none. The runner sets it.
    """

    def __init__(self, context: BuildContext, kv: KVCache, sampler: Sampler, *, selects_tokens: bool = False) -> None:
        """`selects_tokens`: the model returns the hidden states of `SelectedTokens` alone. Raises
        ValueError without a backend."""
        if context.attention is None:
            raise ValueError("an input batch needs a context with an attention backend")
        limits = context.limits
        staged = limits.max_tokens_per_step * _STAGED_BYTES_PER_TOKEN + limits.max_running_requests * _STAGED_BYTES_PER_ROW
        self.table = DeviceTable(limits, context.device)
        self.kv = kv
        self.groups = (
            GroupInputs(kv, self.table, context.device) if isinstance(kv, KVPool) and kv.geometry.num_pools > 1 else None
        )  # None: the model has one cache group
        self.sampling = SamplingTable(limits.max_running_requests, by_row=sampler.by_row)
        self.choose_accepted: ChooseAccepted | None = None
        self.pending = PendingRows(self.table, {} if self.groups is None else self.groups.windows)
        self.max_graph_rows = 0
        self.draws_masked = False
        self.placement: TokenPlacement | None = None
        self.sampler = sampler
        self.selects_tokens = selects_tokens
        self.backend: AttentionBackend = context.attention
        # groups do not know each other's prompts; stages get rows in the order of the batch
        self._keeps_step = context.experts is not None or context.pipeline is not None
        self._staging = make_staging(context.platform, staged)
        self._mask_staging = make_staging(context.platform, 0)  # for deferred grammar masks

    def prepare(self, batch: ScheduledBatch) -> StepInputs:
        """Sets up and releases slots, plans the step, and moves its inputs to the device."""
        self.update_slots(batch)
        batch = shorten_rows(batch)
        layout = compute_layout(batch)
        sampling = self.sampling.plan(batch, layout)
        processing = self.sampler.processors.plan(sampling.slots, sampling.positions)
        plans = StepPlans(sampling, processing, plan_prompts(batch, layout, self.sampling))
        if layout.drafts is not None:
            plans.verification = plan_verification(layout, layout.drafts, batch.slots.astype(np.int64))
            if self.choose_accepted is not None:
                chosen = self.choose_accepted(sampling.slots, layout.sample_positions, layout.drafts.targets)
                plans.verification.arrays["verify.chosen"] = chosen
            if plans.processing is not None:
                rounds = plan_rounds(layout, layout.drafts, self.sampling, self.sampler.processors, sampling.slots, batch.grammar_mask)
                if batch.num_pending is not None and self.table.tree_depth:
                    rounds = rounds[: self.table.tree_depth + 1]
                plans.processing, plans.rounds = None, rounds
        if batch.num_pending is not None:
            self._write_host_tables(batch)
            plans.pending = self.pending.plan(batch, batch.num_pending, layout, self.sampling, self.choose_accepted)
        if batch.draft_order is not None:
            more = 0 if plans.pending is None else plans.pending.width
            plans.drafting = plan_drafting(batch, batch.draft_order, layout, self.sampling, more)
        if self.max_graph_rows and plans.prompts is None and self._fits_decode_graph(batch, layout):
            return self._prepare_replay(batch, layout, plans)
        return self._prepare_forward(batch, layout, plans)

    def update_slots(self, batch: ScheduledBatch) -> None:
        """Sets up and releases slots: all that a batch without rows does."""
        self.sampling.update(batch.setups, batch.released)
        self.sampler.processors.update(batch.setups, batch.released)

    def build_forward_batch(
        self,
        batch: ScheduledBatch,
        layout: BatchLayout,
        extra_inputs: Mapping[str, np.ndarray],
        placement: TokenPlacement | None = None,
        *,
        selects_tokens: bool = False,
    ) -> tuple[ForwardBatch, dict[str, torch.Tensor]]:
        """The batch on the device with the backend's plan, and the `extra_inputs` as tensors of the
        same names.

        The names of `extra_inputs` must differ from the batch's fields. `placement` gives the token
        arrays their addresses. `selects_tokens` adds the extension `SelectedTokens` of the tokens
        that need logits.
        """
        table = self.table
        self._write_host_tables(batch)
        arrays = self._batch_arrays(batch, layout)
        extensions: dict[type, Any] = {}
        if placement is None:
            tensors = self._move(batch, {**arrays, **extra_inputs})
        else:
            placed = placement.place({name: arrays[name] for name in TOKEN_ARRAYS})
            extensions |= placement.extensions(layout.num_tokens)
            others = {name: array for name, array in arrays.items() if name not in placed}
            tensors = self._move(batch, {**others, **extra_inputs}) | placed
        extensions |= make_extensions(layout, self.backend, tensors, is_plain=self.groups is None and self.choose_accepted is None)
        decodes = batch.num_decodes
        if decodes:
            # a step that may still be in flight samples these ids, so the host does not have them
            torch.index_select(table.last_token, 0, tensors["request_slots"][:decodes], out=tensors["token_ids"][:decodes])
        self.pending.read_tokens(tensors, tensors["token_ids"][decodes:])
        self.pending.resolve_tokens(tensors, tensors)
        if selects_tokens:
            extensions[SelectedTokens] = SelectedTokens(tensors["logits_indices"])
        fields: dict[str, Any] = {name: tensors.pop(name) for name in arrays if not name.startswith("group_")}
        forward = ForwardBatch(
            num_decodes=decodes,
            page_table=table.pages,
            kv=self.kv,
            host=self._view_host(batch, arrays["seq_lens"]),
            extensions=extensions,
            **fields,
        )
        if self.groups is not None:
            forward = self.groups.make_views(forward, tensors, self.backend.plan)
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("group_")}
        return replace(forward, plan=self.backend.plan(forward)), tensors

    def _view_host(self, batch: ScheduledBatch, lens: np.ndarray) -> HostView:
        """lens: the least lengths; on a CPU, where `resolve_tokens` changed them, the true ones."""
        if batch.num_pending is None or self.table.is_shared:
            return HostView(batch.slots, batch.num_scheduled, lens, self.table.host_pages)
        return HostView(batch.slots, batch.num_scheduled, lens + batch.num_pending, self.table.host_pages, lens)

    def move_grammar_mask(self, mask: np.ndarray) -> dict[str, torch.Tensor]:
        """A deferred grammar mask, int32 [sampling rows, ceil(vocab / 32)], as the tensors that the
        sampler reads."""
        return self._mask_staging.move(grammar_arrays(mask))

    def _fits_decode_graph(self, batch: ScheduledBatch, layout: BatchLayout) -> bool:
        """Whether a decode graph may run the step, with each token as a row of its own: there are
        few prompt tokens, and they read few keys or the backend reads shared prefixes once. Without
        prompts, rows with drafts run in a graph at any length: a forward pass without one takes
        longer."""
        given = len(batch.token_ids)
        has_encoder = any(setup.encoder_input is not None for setup in batch.setups)
        if layout.num_tokens > self.max_graph_rows or (given and self._keeps_step) or has_encoder:
            return False
        if given and self.groups is not None and self.groups.has_states:
            return False  # a state is read and written by one row of a step
        if batch.draft_order is not None and len(layout.sample_rows) < layout.num_tokens:
            return False  # the first pass of the drafter reads the drawn tokens only
        if batch.num_pending is not None:  # `PendingPlan` has the ids of decodes and drafts, in the order of the batch
            return not given if batch.num_drafts is None else bool(batch.num_drafts[batch.num_decodes :].all())
        if batch.num_drafts is not None and batch.num_drafts[batch.num_decodes :].all():
            return given <= GIVEN_TOKENS
        if given > MAX_SINGLE_TOKEN_ROWS:
            return False
        keys = given * int(layout.seq_lens[batch.num_decodes :].max(initial=0))
        return self.backend.capabilities.shared_prefixes or keys <= _MAX_PROMPT_KEYS

    def _prepare_replay(self, batch: ScheduledBatch, layout: BatchLayout, plans: StepPlans) -> ReplayInputs:
        sampling = plans.sampling
        is_plain = sampling.is_plain and plans.processing is None and not plans.rounds
        is_masked = is_plain and batch.has_deferred_grammar_mask and self.draws_masked
        if is_masked or (is_plain and not batch.has_deferred_grammar_mask):
            tensors, draws = self._stage(batch, plans.later_inputs()), self.sampling.draws(sampling)
        else:  # the sampler replaces the tokens that the graph draws
            tensors, draws = self._stage(batch, {**plans.extra_inputs(), "sampling_slots": sampling.slots}), {}
        drafted = None if plans.pending is None else plans.pending.arrays.get("pending.sources")
        rows, resolve = self._token_rows(batch, layout, drafted), None
        if layout.has_trees and plans.verification is not None:
            rows = replace(rows, trees=self._tree_rows(batch, layout, plans.verification.arrays["verify.bits"]))
        if plans.pending is not None:
            resolve = partial(self._resolve_rows, plans.pending, tensors)
            rows = replace(rows, pending=plans.pending.width)
        else:
            self.pending.resolve_samples(None, tensors)
        return ReplayInputs(plans, tensors, rows, draws, is_masked, resolve)

    def _resolve_rows(self, plan: PendingPlan, tensors: dict[str, torch.Tensor], rows: Mapping[str, torch.Tensor]) -> None:
        """rows: the inputs of a decode graph."""
        self.pending.resolve_tokens(tensors, rows)
        keys = self.pending.resolve_samples(plan, tensors)
        if keys is not None:
            rows["key"][: len(keys)].copy_(keys)

    def _prepare_forward(self, batch: ScheduledBatch, layout: BatchLayout, plans: StepPlans) -> ForwardInputs:
        placement, tokens, used = self.placement, layout.num_tokens, len(layout.logits_indices)
        if placement is not None and tokens > placement.maximum:
            placement = None
        is_selected = placement is None and self.selects_tokens and 2 * used <= tokens
        forward, tensors = self.build_forward_batch(batch, layout, plans.extra_inputs(), placement, selects_tokens=is_selected)
        tensors.setdefault("sampling_slots", forward.request_slots)
        self.pending.resolve_samples(plans.pending, tensors)
        all_sample = len(layout.sample_rows) == used == tokens  # every token samples, in order
        indices = None if is_selected or all_sample else forward.logits_indices
        return ForwardInputs(plans, tensors, forward, indices, placement is not None)

    def _stage(self, batch: ScheduledBatch, extra_inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Writes the batch's pages on the device, and its given tokens into the table. -> the
        `extra_inputs` as tensors."""
        given = len(batch.token_ids) if batch.num_pending is None else 0
        if given:
            extra_inputs = {**extra_inputs, "given_tokens": batch.token_ids.astype(np.int64)}
        has_moves = self.groups is not None and self.groups.has_moves(batch)
        if not len(batch.new_pages) and not extra_inputs and not has_moves:
            return {}
        self._write_host_tables(batch)
        tensors = self._move(batch, extra_inputs)
        if given:
            first = self.table.first_given
            self.table.last_token[first : first + given].copy_(tensors.pop("given_tokens"))
        return tensors

    def _token_rows(self, batch: ScheduledBatch, layout: BatchLayout, drafted: np.ndarray | None) -> TokenRows:
        """The step's tokens one by one. The ids of given tokens are where `_stage` writes them.
        drafted: `PendingPlan` says where those of rows with drafts are."""
        slots, decodes, sampling = batch.slots.astype(np.int64), batch.num_decodes, layout.sample_rows
        table, total = self.table, layout.num_tokens
        every, positions = self._token_slots(batch, layout, slots)
        sources = every
        if decodes < total:
            sources = every.copy()
            sources[decodes:] = table.first_given + np.arange(total - decodes) if drafted is None else drafted
        kv_slots = self.table.find_kv_slots(batch, every, positions)
        places = {} if self.groups is None else self.groups.find_places(batch, slots, every, positions)
        if total == len(sampling):
            return TokenRows(every, positions, sources, every, kv_slots, total, places)
        order = _order_samples(layout)
        drawn = np.full(total, table.padding_slot, np.int64)
        drawn[: len(sampling)] = slots[sampling]
        places = {name: array[order] for name, array in places.items()}
        return TokenRows(every[order], positions[order], sources[order], drawn, kv_slots[order], len(sampling), places)

    def _tree_rows(self, batch: ScheduledBatch, layout: BatchLayout, bits: np.ndarray) -> TreeRows:
        """bits: int32 [tokens]."""
        positions = layout.find_positions(self._token_slots(batch, layout, batch.slots)[1])
        order = _order_samples(layout)
        return TreeRows(positions[order], bits[order])

    @staticmethod
    def _token_slots(batch: ScheduledBatch, layout: BatchLayout, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Request slot and position of each token, int64 [tokens]."""
        total, lens = layout.num_tokens, batch.num_scheduled
        if total == len(slots):
            return slots, batch.num_computed.astype(np.int64)
        return np.repeat(slots, lens), np.arange(total) + np.repeat(batch.num_computed - layout.query_starts[:-1], lens)

    def _write_host_tables(self, batch: ScheduledBatch) -> None:
        self.table.write_host(batch.new_pages)
        if self.groups is not None:
            self.groups.write_tables(batch)

    def _move(self, batch: ScheduledBatch, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Moves arrays and new pages to the device in one copy, and writes the pages into the
        device's table."""
        if self.groups is not None:
            tensors = self._move_pages(batch, {**arrays, **self.groups.list_moves(batch)})
            self.groups.begin_step(tensors)
            return tensors
        return self._move_pages(batch, arrays)

    def _move_pages(self, batch: ScheduledBatch, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        if not len(batch.new_pages) or self.table.is_shared:
            return self._staging.move(arrays)
        writes = self.table.flat_writes(batch.new_pages)
        tensors = self._staging.move({**arrays, **writes})
        self.table.write_device(**{name: tensors.pop(name) for name in writes})
        return tensors

    def _batch_arrays(self, batch: ScheduledBatch, layout: BatchLayout) -> dict[str, np.ndarray]:
        """The fields of `ForwardBatch` that change each step, except the ids of decodes, which only
        the device has."""
        slots = batch.slots.astype(np.int64)
        token_ids = np.empty(layout.num_tokens, np.int64)
        token_ids[batch.num_decodes :] = batch.token_ids
        token_slots, positions = self._token_slots(batch, layout, slots)
        places: dict[str, np.ndarray] = {}
        if self.groups is not None:
            places = self.groups.find_places(batch, slots, token_slots, positions) | self.groups.find_drafted(batch)
        return {
            **places,
            "token_ids": token_ids,
            "positions": layout.find_positions(positions),
            "kv_slots": self.table.find_kv_slots(batch, token_slots, positions),
            "request_slots": slots,
            "logits_indices": layout.logits_indices,
            "seq_lens": layout.seq_lens.astype(np.int32),
            "query_lens": batch.num_scheduled.astype(np.int32),
            "query_starts": layout.query_starts.astype(np.int32),
        }


def _order_samples(layout: BatchLayout) -> np.ndarray:
    """The step's tokens, those that samples are drawn from first, int64 [tokens]."""
    is_inner = np.ones(layout.num_tokens, bool)
    is_inner[layout.logits_indices] = False
    return np.concatenate((layout.logits_indices, np.flatnonzero(is_inner)))
