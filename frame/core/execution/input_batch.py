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
from typing import TYPE_CHECKING, Any, Generic, Protocol

import msgspec
import numpy as np
import torch

from frame.core.execution.pending_rows import PendingRows, TokenFields
from frame.core.execution.staging import make_staging
from frame.core.interfaces.batch import ForwardBatch, HostView, SelectedTokens, TreeMask
from frame.core.interfaces.runner import MAX_SINGLE_TOKEN_ROWS
from frame.core.kv_cache.group_inputs import GroupInputs
from frame.core.kv_cache.kv_pool import MAX_HOST_TOKENS, DeviceTable, KVPool
from frame.core.sampling.batch_layout import A, BatchLayout, compute_layout
from frame.core.sampling.sampling_metadata import GrammarArrays, SamplingTable, find_limited_rows
from frame.core.sampling.step_plan import SamplingPlanner, StepArrays, StepPlans

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.batch import KVCache, ScheduledBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.step_media import StepMedia
    from frame.core.sampling.sampler import Sampler

_MAX_PROMPT_KEYS = 16_384  # keys that the prompt tokens of a decode graph may read in total, without `shared_prefixes`
_STAGED_BYTES_PER_TOKEN = 3 * 8
_STAGED_BYTES_PER_ROW = 256


@dataclass(slots=True)
class TokenArrays(Generic[A]):
    """The fields of `ForwardBatch` by token. All int64 [tokens]."""

    token_ids: A  # of decodes the device alone has the ids
    positions: A
    kv_slots: A


@dataclass(slots=True)
class RowArrays(Generic[A]):
    """The fields of `ForwardBatch` by row; see there."""

    request_slots: A
    logits_indices: A
    seq_lens: A
    query_lens: A
    query_starts: A


@dataclass(slots=True)
class StagedArrays(Generic[A]):
    """What one copy moves to the device."""

    step: StepArrays[A]
    tokens: TokenArrays[A] | None  # None: a `TokenPlacement` or a decode graph has them
    rows: RowArrays[A] | None  # None: a decode graph runs the step
    host_tokens: A | None  # int64 [n]; the tokens from the host of a step that a decode graph runs
    page_writes: dict[str, A]  # see `PageTable.flat_writes`
    groups: dict[str, A]  # those of `GroupInputs`, by its names
    media: dict[str, A]  # those of `StepMedia`, by its names


class TokenPlacement(Protocol):
    """Fixed device addresses for the token arrays of a step, as piecewise graphs need them."""

    @property
    def maximum(self) -> int:
        """The largest number of tokens that has a place."""
        ...

    def place(self, tokens: TokenArrays[np.ndarray]) -> TokenArrays[torch.Tensor]:
        """Copies the arrays to their addresses."""
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
    seq_lens: np.ndarray
    sources: np.ndarray  # index of the row's token id in the last-token table
    drawn: np.ndarray  # index in the last-token table that the drawn token is written to
    kv_slots: np.ndarray
    num_sampling: int
    places: Mapping[str, np.ndarray]  # `GroupInputs.find_places`; empty for a model with one cache group
    pending: int = 0  # tokens by which lengths and positions may be greater
    tree_bits: np.ndarray | None = None  # int32 [tokens], see `TreeMask`; None: no row is a token of a tree


@dataclass(slots=True)
class ForwardInputs:
    """A step that runs the model's forward pass.

    logits_indices: int64 [n], the tokens whose hidden states are used; None: all that the forward
    returns, in order. is_placed: whether the token arrays are at the addresses of the
    `TokenPlacement`, so that its graphs run the step.
    """

    plans: StepPlans
    tensors: StepArrays[torch.Tensor]
    batch: ForwardBatch
    logits_indices: torch.Tensor | None
    is_placed: bool


@dataclass(slots=True)
class ReplayInputs:
    """A step that a decode graph replays.

    resolve: changes the graph's inputs before its replay; None: nothing to change. is_masked: a
    graph draws under a deferred grammar mask.
    """

    plans: StepPlans
    tensors: StepArrays[torch.Tensor]
    rows: TokenRows
    resolve: Callable[[Mapping[str, torch.Tensor]], None] | None
    is_masked: bool


StepInputs = ForwardInputs | ReplayInputs


class InputBatch:
    """The inputs of one runner. `prepare` once a step, in launch order, on the runner's stream and
    in inference mode.

    max_graph_rows: the largest batch that has a decode graph; 0: none has. The runner sets it.
    draws_masked: whether graphs draw under deferred grammar masks. The runner sets it.
    placement: the addresses of the piecewise graphs; None: there are none. The runner sets it.
    media: None: media are off. The builder sets it.
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
        windows = {} if self.groups is None else self.groups.windows
        sampling = SamplingTable(limits.max_running_requests, by_row=sampler.by_row)
        self.planner = SamplingPlanner(sampling, sampler.processors, self.table, tuple(windows.values()))
        self.pending = PendingRows(self.table)
        self.max_graph_rows = 0
        self.draws_masked = False
        self.placement: TokenPlacement | None = None
        self.media: StepMedia | None = None
        self.sampler = sampler
        self.selects_tokens = selects_tokens
        self.backend: AttentionBackend = context.attention
        # groups do not know each other's prompts; stages get rows in the order of the batch
        self._keeps_step = context.experts is not None or context.pipeline is not None
        self._staging = make_staging(context.platform, staged)
        self._mask_staging = make_staging(context.platform, 0)  # for deferred grammar masks

    def prepare(self, batch: ScheduledBatch) -> StepInputs:
        """Sets up and releases slots, plans the step, and moves its inputs to the device."""
        if batch.num_pending is not None:  # planned from the minimum lengths
            batch = msgspec.structs.replace(batch, num_computed=batch.num_computed - batch.num_pending)
            self._write_host_tables(batch)
        layout = compute_layout(batch)
        if self.media is not None:
            layout = replace(layout, positions=self.media.find_positions(layout.token_slots, layout.positions, batch))
        is_replay = self._fits_decode_graph(batch, layout)
        draws = is_replay and self.sampler.in_graphs and (self.draws_masked or not batch.has_deferred_grammar_mask)
        plans = self.planner.plan(batch, layout, is_replay=is_replay, draws=draws)
        drafting = plans.arrays.drafting
        if self.media is not None and drafting is not None and drafting.places is not None:
            drafting.places = self.media.find_positions(layout.sample_slots, drafting.places)
        return self._prepare_replay(batch, layout, plans) if is_replay else self._prepare_forward(batch, layout, plans)

    def build_forward_batch(
        self,
        batch: ScheduledBatch,
        layout: BatchLayout,
        arrays: StepArrays[np.ndarray],
        placement: TokenPlacement | None = None,
        *,
        selects_tokens: bool = False,
    ) -> tuple[ForwardBatch, StepArrays[torch.Tensor]]:
        """The batch on the device with the backend's plan, and `arrays` as tensors.

        `placement` gives the token arrays their addresses. `selects_tokens` adds the extension
        `SelectedTokens` of the tokens that need logits.
        """
        self._write_host_tables(batch)
        table, decodes = self.table, batch.num_decodes
        host_tokens, host_rows = self._list_tokens(batch, layout), _list_rows(batch, layout)
        places: dict[str, np.ndarray] = {}
        if self.groups is not None:
            places = self.groups.find_places(batch, layout.slots, layout.token_slots, layout.places) | self.groups.find_drafted(batch)
        extensions: dict[type, Any] = {}
        if placement is None:
            staged = self._move(batch, arrays, host_tokens, host_rows, places)
            tokens = staged.tokens
        else:
            tokens = placement.place(host_tokens)
            extensions |= placement.extensions(layout.num_tokens)
            staged = self._move(batch, arrays, None, host_rows, places)
        rows, tensors, pending = staged.rows, staged.step, staged.step.pending
        assert tokens is not None and rows is not None, "both were staged"
        if decodes:
            # a step that may still be in flight samples these ids, so the host does not have them
            torch.index_select(table.last_token, 0, rows.request_slots[:decodes], out=tokens.token_ids[:decodes])
        if pending is not None and pending.sources is not None:
            out = tokens.token_ids[decodes : decodes + len(pending.sources)]
            torch.index_select(table.last_token, 0, pending.sources, out=out)
        fields = None
        if pending is not None:
            kv_slots = (tokens.kv_slots, *(staged.groups[name] for name in self._list_windows()))
            fields = TokenFields(tokens.positions, rows.seq_lens, rows.request_slots, kv_slots)
        self.pending.resolve(tensors, fields)
        if tensors.verification is not None and tensors.verification.bits is not None:
            is_plain = self.groups is None and self.planner.choose_accepted is None
            extensions[TreeMask] = make_tree_mask(layout, self.backend, tensors.verification.bits, is_plain=is_plain)
        if selects_tokens:
            extensions[SelectedTokens] = SelectedTokens(rows.logits_indices)
        if self.media is not None and staged.media:
            extensions |= self.media.make_extensions(staged.media, tokens.positions)
        forward = ForwardBatch(
            num_decodes=decodes,
            token_ids=tokens.token_ids,
            positions=tokens.positions,
            kv_slots=tokens.kv_slots,
            request_slots=rows.request_slots,
            seq_lens=rows.seq_lens,
            query_lens=rows.query_lens,
            query_starts=rows.query_starts,
            page_table=table.pages,
            logits_indices=rows.logits_indices,
            kv=self.kv,
            host=self._view_host(batch, host_rows.seq_lens),
            extensions=extensions,
        )
        if self.groups is not None:
            forward = self.groups.make_views(forward, staged.groups, self.backend.plan)
        return replace(forward, plan=self.backend.plan(forward)), tensors

    def _list_windows(self) -> tuple[str, ...]:
        return () if self.groups is None else tuple(self.groups.windows)

    def _view_host(self, batch: ScheduledBatch, lens: np.ndarray) -> HostView:
        """lens: the minimum lengths; on a CPU, where `PendingRows` changed them, the true ones."""
        if batch.num_pending is None or self.table.is_shared:
            return HostView(batch.slots, batch.num_scheduled, lens, self.table.host_pages)
        return HostView(batch.slots, batch.num_scheduled, lens + batch.num_pending, self.table.host_pages, lens)

    def move_grammar_mask(self, mask: np.ndarray) -> GrammarArrays[torch.Tensor] | None:
        """A deferred grammar mask, int32 [sampling rows, ceil(vocab / 32)], as the tensors that the
        sampler reads; None: it limits no row."""
        grammar = find_limited_rows(mask)
        return None if grammar is None else self._mask_staging.move(grammar)

    def _fits_decode_graph(self, batch: ScheduledBatch, layout: BatchLayout) -> bool:
        """Whether a decode graph may run the step, with each token as a row of its own: there are
        few prompt tokens, and they read few keys or the backend reads shared prefixes once. Without
        prompts, rows with drafts run in a graph at any length: a forward pass without one takes
        longer."""
        num_host = len(batch.token_ids)
        if layout.num_tokens > self.max_graph_rows or len(layout.prompt_logprob_rows) or (num_host and self._keeps_step):
            return False
        if any(order.slot >= 0 for order in batch.encodes) or batch.media_rows is not None or batch.rotary_positions is not None:
            return False
        if num_host and self.groups is not None and self.groups.has_states:
            return False  # a state is read and written by one row of a step
        if batch.draft_order is not None and len(layout.sample_rows) < layout.num_tokens:
            return False  # the first pass of the drafter reads the drawn tokens only
        if batch.num_pending is not None:  # `PendingPlan` has the ids of decodes and drafts, in the order of the batch
            return not num_host if batch.num_drafts is None else bool(batch.num_drafts[batch.num_decodes :].all())
        if batch.num_drafts is not None and batch.num_drafts[batch.num_decodes :].all():
            return num_host <= MAX_HOST_TOKENS
        if num_host > MAX_SINGLE_TOKEN_ROWS:
            return False
        keys = num_host * int(layout.seq_lens[batch.num_decodes :].max(initial=0))
        return self.backend.capabilities.shared_prefixes or keys <= _MAX_PROMPT_KEYS

    def _prepare_replay(self, batch: ScheduledBatch, layout: BatchLayout, plans: StepPlans) -> ReplayInputs:
        tensors, rows, resolve = self._stage_replay(batch, plans), self._list_token_rows(batch, layout, plans), None
        if plans.pending is None:
            self.pending.resolve(tensors, None)
        else:
            resolve = partial(self._resolve_rows, tensors)
        return ReplayInputs(plans, tensors, rows, resolve, is_masked=bool(plans.sampling.draws) and batch.has_deferred_grammar_mask)

    def _resolve_rows(self, tensors: StepArrays[torch.Tensor], rows: Mapping[str, torch.Tensor]) -> None:
        """rows: the inputs of a decode graph."""
        kv_slots = [rows[name] for name in ("kv_slots", *self._list_windows())]
        fields = TokenFields(rows["positions"], rows["seq_lens"], rows["request_slots"], kv_slots, rows.get("tree_bits"))
        keys = self.pending.resolve(tensors, fields)
        if keys is not None:
            rows["key"][: len(keys)].copy_(keys)

    def _prepare_forward(self, batch: ScheduledBatch, layout: BatchLayout, plans: StepPlans) -> ForwardInputs:
        placement, tokens, used = self.placement, layout.num_tokens, len(layout.logits_indices)
        if placement is not None and tokens > placement.maximum:
            placement = None
        is_selected = placement is None and self.selects_tokens and 2 * used <= tokens
        forward, tensors = self.build_forward_batch(batch, layout, plans.arrays, placement, selects_tokens=is_selected)
        if tensors.sampling is not None and tensors.sampling.slots is None:
            tensors.sampling.slots = forward.request_slots
        all_sample = len(layout.sample_rows) == used == tokens  # every token samples, in order
        indices = None if is_selected or all_sample else forward.logits_indices
        return ForwardInputs(plans, tensors, forward, indices, placement is not None)

    def _stage_replay(self, batch: ScheduledBatch, plans: StepPlans) -> StepArrays[torch.Tensor]:
        """Writes the batch's pages on the device, and its tokens from the host into the table. ->
        the arrays of the plans as tensors."""
        num_host = len(batch.token_ids) if batch.num_pending is None else 0
        has_moves = self.groups is not None and self.groups.has_moves(batch)
        has_arrays = not plans.sampling.draws or any(each is not None for each in (plans.verification, plans.drafting, plans.pending))
        if not len(batch.new_pages) and not num_host and not has_moves and not has_arrays:
            return StepArrays()
        self._write_host_tables(batch)
        staged = self._move(batch, plans.arrays, host_tokens=batch.token_ids.astype(np.int64) if num_host else None)
        if staged.host_tokens is not None:
            first = self.table.first_host_token
            self.table.last_token[first : first + num_host].copy_(staged.host_tokens)
        return staged.step

    def _list_token_rows(self, batch: ScheduledBatch, layout: BatchLayout, plans: StepPlans) -> TokenRows:
        """The step's tokens one by one. The ids of tokens from the host are where `_stage_replay`
        writes them, and `PendingPlan` says where those of rows with drafts are."""
        table, total, decodes, num_samples = self.table, layout.num_tokens, batch.num_decodes, len(layout.sample_rows)
        slots, places, positions, pending = layout.token_slots, layout.places, layout.positions, plans.pending
        sources, lens = slots, places + 1
        if decodes < total:
            drafted = None if pending is None else pending.arrays.sources
            sources = slots.copy()
            sources[decodes:] = table.first_host_token + np.arange(total - decodes) if drafted is None else drafted
        kv_slots = table.find_kv_slots(batch, slots, places)
        further = {} if self.groups is None else self.groups.find_places(batch, layout.slots, slots, places)
        bits = None if plans.verification is None else plans.verification.arrays.bits
        drawn = slots
        if total > num_samples:
            order = layout.order_samples()
            drawn = np.full(total, table.padding_slot, np.int64)
            drawn[:num_samples] = layout.sample_slots
            slots, positions, lens, sources, kv_slots = (each[order] for each in (slots, positions, lens, sources, kv_slots))
            further = {name: array[order] for name, array in further.items()}
            bits = None if bits is None else bits[order]
        width = 0 if pending is None else pending.width
        return TokenRows(slots, positions, lens, sources, drawn, kv_slots, num_samples, further, width, bits)

    def _write_host_tables(self, batch: ScheduledBatch) -> None:
        if len(batch.new_pages):
            self.table.write_host(batch.new_pages)
        if self.groups is not None:
            self.groups.write_tables(batch)

    def _move(
        self,
        batch: ScheduledBatch,
        arrays: StepArrays[np.ndarray],
        tokens: TokenArrays[np.ndarray] | None = None,
        rows: RowArrays[np.ndarray] | None = None,
        places: Mapping[str, np.ndarray] | None = None,
        *,
        host_tokens: np.ndarray | None = None,
    ) -> StagedArrays[torch.Tensor]:
        """Moves arrays and new pages to the device in one copy, and writes the pages into the
        device's tables."""
        table, groups = self.table, dict(places or {})
        writes = table.flat_writes(batch.new_pages) if len(batch.new_pages) and not table.is_shared else {}
        if self.groups is not None:
            groups |= self.groups.list_moves(batch)
        media = {} if self.media is None or rows is None else self.media.list_arrays(batch)
        staged: StagedArrays[torch.Tensor] = self._staging.move(StagedArrays(arrays, tokens, rows, host_tokens, writes, groups, media))
        if writes:
            table.write_device(**staged.page_writes)
        if self.groups is not None:
            self.groups.begin_step(staged.groups)
        return staged

    def _list_tokens(self, batch: ScheduledBatch, layout: BatchLayout) -> TokenArrays[np.ndarray]:
        token_ids = np.empty(layout.num_tokens, np.int64)
        token_ids[batch.num_decodes :] = batch.token_ids
        return TokenArrays(token_ids, layout.positions, self.table.find_kv_slots(batch, layout.token_slots, layout.places))


def _list_rows(batch: ScheduledBatch, layout: BatchLayout) -> RowArrays[np.ndarray]:
    return RowArrays(
        request_slots=layout.slots,
        logits_indices=layout.logits_indices,
        seq_lens=layout.seq_lens.astype(np.int32),
        query_lens=batch.num_scheduled.astype(np.int32),
        query_starts=layout.query_starts.astype(np.int32),
    )


def make_tree_mask(layout: BatchLayout, backend: AttentionBackend, bits: torch.Tensor, *, is_plain: bool) -> TreeMask:
    """The mask of a step with trees. is_plain: all layers are in one cache group, and drafts are
    compared with what is drawn. Raises ValueError where trees cannot be verified."""
    if not backend.capabilities.tree_mask:
        raise ValueError(f"{type(backend).__name__} cannot verify trees of drafted tokens; use a drafter of chains")
    if not is_plain:
        raise ValueError("models with several cache groups, and synthetic acceptance, verify no trees of drafted tokens")
    assert layout.drafts is not None, "a step with trees has drafts"
    return TreeMask(layout.drafts.rows[layout.drafts.num_samples > 1], bits)
