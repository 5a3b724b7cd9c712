"""Decode steps as CUDA graphs: forward pass, LM head and sampling of a fixed number of rows,
captured once and replayed each step.

A graph runs every decode batch of up to its size. Padding rows use the padding slot and write to
page 0. The tokens of a short prompt run as decode rows too; only the token drawn after the last one
is used. Inputs that change between steps are in `InputBuffers`, at fixed addresses. On a CPU, where
there are no graphs, a step is computed again instead of replayed. Used by the model runner. Must
not know a request or a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from frame.core.execution.staging import to_torch_dtype
from frame.core.garbage_collection import paused_collection
from frame.core.interfaces.batch import ForwardBatch, HostView, TreeMask
from frame.core.interfaces.platform import Platform, SupportsGraphs, SupportsStreams
from frame.core.interfaces.rank_context import Track, track_silently

if TYPE_CHECKING:
    from frame.core.execution.input_batch import InputBatch, TokenRows
    from frame.core.interfaces.adapter_layers import StepAdapters
    from frame.core.sampling.sampling_metadata import GrammarArrays

_NUM_BUFFERS = 3
_ALIGNMENT = 16


class DecodeOutputs(NamedTuple):
    """The outputs of a captured step, valid until the next replay. Each has one entry per row of
    the batch."""

    token_ids: torch.Tensor  # int64 [rows]
    best: torch.Tensor  # float32 [rows]; the greatest logit
    logits: torch.Tensor  # [rows, vocab]
    states: torch.Tensor | None = None  # [rows, width]; what a device drafter reads


class Captured(Protocol):
    def replay(self) -> None: ...


# (batch, sampling parameters by name, index in the last-token table of each row's token, int64
# [rows]) -> outputs
Body = Callable[[ForwardBatch, Mapping[str, torch.Tensor], torch.Tensor], DecodeOutputs]
# (outputs of the body, parameters and indices as above) -> outputs with tokens that are drawn again
# with filters; updates the last-token table
Redraw = Callable[[DecodeOutputs, Mapping[str, torch.Tensor], torch.Tensor], DecodeOutputs]

Outputs = TypeVar("Outputs", bound=tuple[torch.Tensor | None, ...])

PADDED_ROWS = 16  # of which batch-invariant matmuls take multiples
_DRAW: dict[str, np.generic] = {"temperature": np.float32(0.0), "key": np.int64(0)}  # values in padding rows
_FILTERS: dict[str, np.generic] = {"top_k": np.int32(0), "top_p": np.float32(1.0), "log_min_p": np.float32(-np.inf)}


def list_graph_sizes(maximum: int, multiple: int = 1) -> tuple[int, ...]:
    """The batch sizes to capture, for batches of up to `maximum` rows: multiples of `multiple`, and
    the maximum. Small sizes are closer together, because padding costs a larger part of their
    time."""
    steps = [1, 2, 4, *range(8, 49, 8), *range(64, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, maximum, 128)]
    return (*(size for size in steps if size < maximum and size % multiple == 0), maximum)


class InputBuffers:
    """The input arrays of a captured step, one entry per row, in one pinned buffer that one copy
    moves to the device.

    Pinned buffers take turns, so that a copy in flight is not overwritten.
    """

    def __init__(self, maximum: int, platform: Platform, padding: Mapping[str, np.generic]) -> None:
        """`padding`: the value of each array in padding rows; its dtype is the array's dtype."""
        self._padding = padding
        self._turn = 0
        offsets, total = {}, 0
        for name, value in padding.items():
            offsets[name] = total
            total += -(-value.nbytes * maximum // _ALIGNMENT) * _ALIGNMENT
        streams = platform if isinstance(platform, SupportsStreams) else None
        self._pinned = [
            torch.empty(total, dtype=torch.uint8) if streams is None else streams.allocate_pinned((total,), torch.uint8)
            for _ in range(_NUM_BUFFERS)
        ]
        self._copied = [] if streams is None else [streams.create_event() for _ in range(_NUM_BUFFERS)]
        self._host = [_views(pinned.numpy(), offsets, padding, maximum) for pinned in self._pinned]
        self._target = torch.empty(total, dtype=torch.uint8, device=platform.device)
        self.tensors = {
            name: self._target[offset : offset + padding[name].nbytes * maximum].view(to_torch_dtype(padding[name].dtype))
            for name, offset in offsets.items()
        }
        for host in self._host:
            for name, value in padding.items():
                host[name][:] = value
        self._target.copy_(self._pinned[0])

    def write(self, arrays: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
        """Copy a step's arrays (all of one length) to the device, padded to `size` rows. -> the
        padded host arrays, valid until the next call but one."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if self._copied:
            self._copied[self._turn].synchronize()
        host = self._host[self._turn]
        for name, array in arrays.items():
            rows = host[name]
            rows[: len(array)] = array
            rows[len(array) : size] = self._padding[name]
        self._target.copy_(self._pinned[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return {name: host[name][:size] for name in arrays}


@dataclass(frozen=True, slots=True)
class CapturedSize:
    """The captured step of one size and its input batch. `masked`: a graph that draws the step's
    tokens again under grammar masks; None without `vocab_size`. `filtered`: one that draws tokens
    with filters from the step's logits; None without `redraw`."""

    batch: ForwardBatch
    outputs: DecodeOutputs
    captured: Captured
    masked: Captured | None
    filtered: tuple[DecodeOutputs, Captured] | None
    views: tuple[ForwardBatch, ...]  # of the cache groups with a page table of their own, one each
    adapted: CapturedSize | None = None  # the same step with adapters, into the same outputs; None without `adapters`


class DecodeGraphs:
    """The captured decode steps of one runner. Call `capture` once, then `replay`, and
    `draw_masked` after a replay whose grammar mask comes later, all on the runner's stream and in
    inference mode. `replayed`: size and host view of the last replay."""

    def __init__(
        self,
        body: Body,
        input_batch: InputBatch,
        sizes: tuple[int, ...],
        platform: Platform,
        redraw: Redraw | None = None,
        vocab_size: int = 0,
    ) -> None:
        """`redraw` draws tokens with top-k, top-p and min-p; None: steps with filters are sampled
        outside the graph. `vocab_size`: of grammar masks; 0: so are steps with these."""
        self._body = body
        self.adapters: StepAdapters | None = None  # the runner sets it
        self._redraw = redraw
        self._input_batch = input_batch
        self._backend = input_batch.backend
        self.platform = platform
        self.device = platform.device
        self.replayed = (0, HostView(*[np.empty(0, np.int32)] * 4))
        maximum = sizes[-1]
        padding_slot = input_batch.table.padding_slot
        padding: dict[str, np.generic] = {
            "request_slots": np.int64(padding_slot),
            "token_slots": np.int64(padding_slot),
            "drawn_slots": np.int64(padding_slot),
            "positions": np.int64(0),
            "kv_slots": np.int64(0),
            "seq_lens": np.int32(1),
            **({} if input_batch.groups is None else input_batch.groups.padding),
            **({"tree_bits": np.int32(-1)} if input_batch.table.has_trees else {}),
            **_DRAW,
            **_FILTERS,
        }
        self._buffers = InputBuffers(maximum, platform, padding)
        self._masked_rows = torch.full((maximum,), -1, dtype=torch.int64, device=self.device)  # -1: no row
        self._masks = torch.full((maximum, -(-vocab_size // 32)), -1, dtype=torch.int32, device=self.device)
        self._ones = np.ones(maximum, np.int32)
        self._smallest = np.searchsorted(np.array(sizes), np.arange(maximum + 1))  # by number of rows: index of the size
        self._sizes = sizes
        self.steps: list[CapturedSize] = []

    @property
    def maximum(self) -> int:
        """The largest batch that has a graph."""
        return self._sizes[-1]

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """The inputs of the last replay on the device, one entry a row."""
        return self._buffers.tensors

    def find_size(self, rows: int) -> int:
        """The smallest size that holds so many rows."""
        return self._sizes[self._smallest[rows]]

    def capture(self, *, is_dry: bool = False, track: Track = track_silently) -> None:
        """Run and capture each size, the largest first, so that smaller sizes reuse its memory.
        is_dry: run each size only, and keep the states of the step."""
        pool = None if is_dry else create_graph_pool(self.platform)
        counted = torch.arange(self.maximum + 1, dtype=torch.int64, device=self.device)
        token_ids = torch.zeros(self.maximum, dtype=torch.int64, device=self.device)
        with paused_collection(collects_first=True):
            for size in track(self._sizes[::-1], "capturing graphs of decode steps"):
                step = self._captured(self._batch(size, counted, token_ids), pool)
                if is_dry:  # without the pool of graphs, all logits together take gigabytes
                    outputs = step.outputs._replace(logits=step.outputs.best)
                    step = replace(step, outputs=outputs, captured=_Recomputed(lambda: (), ()), masked=None, filtered=None, adapted=None)
                self.steps.insert(0, step)

    def replay(
        self,
        tokens: TokenRows,
        draws: Mapping[str, np.ndarray],
        resolve: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
        *,
        is_masked: bool = False,
    ) -> DecodeOutputs:
        """Run at most `maximum` rows of one token each, whose pages and ids are in the table. ->
        the outputs of the sampling rows.

        draws: temperature and key of each sampling row, and all filters if a row has one; empty if
        only the logits are used. resolve: called with the inputs on the device, which it may
        change. is_masked: `draw_masked` draws the tokens.
        """
        rows = len(tokens.slots)
        step = self.steps[self._smallest[rows]]
        if self.adapters is not None and self.adapters.is_active and step.adapted is not None:
            step = step.adapted
        size = step.batch.num_rows
        arrays = {
            "request_slots": tokens.slots,
            "token_slots": tokens.sources,
            "drawn_slots": tokens.drawn,
            "positions": tokens.positions,
            "kv_slots": tokens.kv_slots,
            "seq_lens": tokens.seq_lens,
            **tokens.places,
            **draws,
        }
        if self._input_batch.table.has_trees:
            arrays["tree_bits"] = np.full(rows, -1, np.int32) if tokens.tree_bits is None else tokens.tree_bits
        padded = self._buffers.write(arrays, size)
        lens, minimum = padded["seq_lens"], None
        if resolve is not None:
            resolve(self._buffers.tensors)
            lens, minimum = lens + np.int32(tokens.pending), lens
        host = HostView(padded["request_slots"], self._ones[:size], lens, step.batch.host.page_table, minimum)
        self.replayed = size, host
        for view in step.views:
            viewed = replace(host, page_table=view.host.page_table)
            if view.seq_lens is not step.batch.seq_lens:  # of encoder blocks, which have one length
                viewed = replace(viewed, seq_lens=view.host.seq_lens, min_lens=None)
            self._backend.replay_plan(view.plan, replace(view, host=viewed))
        self._backend.replay_plan(step.batch.plan, replace(step.batch, host=host))
        step.captured.replay()
        return _first_rows(step.outputs, tokens.num_sampling) if is_masked else self._draw_filtered(step, tokens, draws)

    def draw_masked(self, tokens: TokenRows, draws: Mapping[str, np.ndarray], grammar: GrammarArrays[torch.Tensor] | None) -> DecodeOutputs:
        """Draw the tokens of the last replay, whose arguments these are, under a grammar mask.
        grammar: None: no row is limited. -> the outputs of the sampling rows."""
        step = self.steps[self._smallest[len(tokens.slots)]]
        if grammar is not None:
            assert step.masked is not None, "the step was replayed with `is_masked`"
            rows = len(grammar.rows)
            self._masked_rows[:rows].copy_(grammar.rows)
            self._masked_rows[rows : step.batch.num_rows].fill_(-1)
            self._masks[:rows].copy_(grammar.mask)
            step.masked.replay()
        return self._draw_filtered(step, tokens, draws)

    @staticmethod
    def _draw_filtered(step: CapturedSize, tokens: TokenRows, draws: Mapping[str, np.ndarray]) -> DecodeOutputs:
        outputs = step.outputs
        if step.filtered is not None and "top_k" in draws:
            outputs, captured = step.filtered
            captured.replay()
        return _first_rows(outputs, tokens.num_sampling)

    def _batch(self, size: int, counted: torch.Tensor, token_ids: torch.Tensor) -> ForwardBatch:
        """The input batch of the graph of one size."""
        inputs, table = self._buffers.tensors, self._input_batch.table
        counts = counted.int()
        slots = np.full(size, table.padding_slot, np.int32)
        return ForwardBatch(
            num_decodes=size,
            token_ids=token_ids[:size],
            positions=inputs["positions"][:size],
            kv_slots=inputs["kv_slots"][:size],
            request_slots=inputs["request_slots"][:size],
            seq_lens=inputs["seq_lens"][:size],
            query_lens=torch.ones(size, dtype=torch.int32, device=self.device),
            query_starts=counts[: size + 1],
            page_table=table.pages,
            logits_indices=counted[:size],
            kv=self._input_batch.kv,
            host=HostView(slots, self._ones[:size], self._ones[:size], table.host_pages),
            extensions={TreeMask: TreeMask(np.arange(size), inputs["tree_bits"][:size])} if table.has_trees else {},
        )

    def _captured(self, batch: ForwardBatch, pool: Any) -> CapturedSize:
        size, table = batch.num_rows, self._input_batch.table
        inputs = {name: tensor[:size] for name, tensor in self._buffers.tensors.items()}
        params = {name: inputs[name] for name in _DRAW}

        def run(planned: ForwardBatch) -> DecodeOutputs:
            # a step that may still be in flight samples these ids, so the host does not have them
            torch.index_select(table.last_token, 0, inputs["token_slots"], out=batch.token_ids)
            return self._body(bound_lengths(planned), params, inputs["drawn_slots"])

        def capture(into: DecodeOutputs | None = None) -> tuple[ForwardBatch, DecodeOutputs, Captured]:
            """The batch with its plan, and the step, whose outputs are copied `into` others."""
            # a plan may prepare its tensors in the first call of a capture: each needs its own
            plain, planned = (self._planned(batch, inputs, plan) for plan in (self._backend.plan, self._backend.capture_plan))
            if into is None:
                return planned, *capture_step(self.platform, pool, lambda: run(plain), lambda: run(planned))
            return planned, *capture_step(self.platform, pool, lambda: _copy(run(plain), into), lambda: _copy(run(planned), into))

        planned, outputs, captured = capture()
        masked = filtered = adapted = None
        if self._masks.shape[1]:
            draw = partial(self._draw_again, outputs, params, inputs["drawn_slots"])
            _, masked = capture_step(self.platform, pool, draw, draw)
        if self._redraw is not None:
            filters = {name: inputs[name] for name in (*_DRAW, *_FILTERS)}
            again = partial(self._redraw, outputs, filters, inputs["drawn_slots"])
            filtered = capture_step(self.platform, pool, again, again)
        if self.adapters is not None:
            self.adapters.is_active = True
            adapted, _, graph = capture(outputs)
            self.adapters.end_step()
        if pool is not None and isinstance(self.platform, SupportsGraphs):  # smaller sizes use the memory: see `create_graph_pool`
            outputs = outputs._replace(logits=self.platform.borrow(outputs.logits))
            filtered = filtered and (filtered[0]._replace(logits=outputs.logits), filtered[1])
        step = CapturedSize(planned, outputs, captured, masked, filtered, _list_views(planned))
        return step if adapted is None else replace(step, adapted=replace(step, batch=adapted, captured=graph, views=_list_views(adapted)))

    def _draw_again(self, outputs: DecodeOutputs, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> DecodeOutputs:
        """Draw the tokens again under `_masks`, into the outputs."""
        size, operations = len(outputs.token_ids), self._input_batch.sampler.operations
        operations.mask_logits(outputs.logits, self._masked_rows[:size], self._masks[:size])
        drawn = operations.draw_plain(outputs.logits, params["temperature"], params["key"], (self._input_batch.table.last_token, slots))
        for target, source in zip((outputs.token_ids, outputs.best), drawn, strict=True):
            target.copy_(source)
        return outputs

    def _planned(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], plan: Callable[[ForwardBatch], Any]) -> ForwardBatch:
        """The batch with its plan, and with the views of its cache groups."""
        groups = self._input_batch.groups
        if groups is not None:
            batch = groups.make_views(batch, inputs, plan)
        return replace(batch, plan=plan(batch))


def _list_views(batch: ForwardBatch) -> tuple[ForwardBatch, ...]:
    """The batch's views of cache groups, one each."""
    return tuple({view.group: view for view in (batch.views or {}).values()}.values())


def _copy(sources: DecodeOutputs, targets: DecodeOutputs) -> DecodeOutputs:
    for target, source in zip(targets, sources, strict=True):
        if target is not None and source is not None:
            target.copy_(source)
    return targets


def _first_rows(outputs: DecodeOutputs, rows: int) -> DecodeOutputs:
    if len(outputs.token_ids) == rows:
        return outputs
    return DecodeOutputs._make(None if tensor is None else tensor[:rows] for tensor in outputs)


def bound_lengths(batch: ForwardBatch) -> ForwardBatch:
    """A batch for capture whose host view has the maximum lengths of rows in a replay, and the
    views of its cache groups too (but those of encoder blocks, which have lengths of their own)."""
    max_length = np.full_like(batch.host.seq_lens, batch.page_table.shape[1] * batch.kv.page_size)

    def bound(view: ForwardBatch) -> ForwardBatch:
        return replace(view, host=replace(view.host, seq_lens=max_length)) if view.seq_lens is batch.seq_lens else view

    return replace(bound(batch), views=batch.views and {layer: bound(view) for layer, view in batch.views.items()})


def create_graph_pool(platform: Platform) -> object | None:
    """The memory of several graphs; None: the platform captures none."""
    return platform.create_graph_pool() if isinstance(platform, SupportsGraphs) else None


def capture_step(platform: Platform, pool: Any, first: Callable[[], Outputs], run: Callable[[], Outputs]) -> tuple[Outputs, Captured]:
    """Capture `run` after a call of `first`, which compiles and initialises its kernels. -> its
    outputs, which each replay overwrites."""
    outputs = first()
    if pool is None or not isinstance(platform, SupportsGraphs):
        return outputs, _Recomputed(first, outputs)
    graph = platform.begin_capture(pool)
    try:
        outputs = run()
    finally:
        platform.end_capture(graph)
    return outputs, graph


class _Recomputed:
    """The CPU's stand-in for a graph: computes the step again and copies the results into the first
    run's outputs."""

    def __init__(self, run: Callable[[], tuple[torch.Tensor | None, ...]], outputs: tuple[torch.Tensor | None, ...]) -> None:
        self._run = run
        self._outputs = outputs

    def replay(self) -> None:
        for target, source in zip(self._outputs, self._run(), strict=True):
            if target is not None and source is not None and target is not source:
                target.copy_(source)


def _views(buffer: np.ndarray, offsets: Mapping[str, int], padding: Mapping[str, np.generic], maximum: int) -> dict[str, np.ndarray]:
    return {name: buffer[offset : offset + padding[name].nbytes * maximum].view(padding[name].dtype) for name, offset in offsets.items()}
