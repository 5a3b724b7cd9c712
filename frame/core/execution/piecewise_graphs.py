"""Prefill steps as piecewise CUDA graphs: the computations between attention calls are captured for
fixed numbers of tokens; attention, and what a layer computes with its sequences' states, runs
between the pieces with the step's own plan.

Each layer then costs the host one replay and one call of the attention backend. A size runs every
step of up to so many tokens; padding tokens write to page 0. Requirement: outside of these calls, a
model reads only per-token fields of the batch (ids, positions, KV slots). On a CPU, where there are
no graphs, the pieces are computed again. Used by the model runner. Must not know a request or a
plugin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.execution.decode_graphs import InputBuffers
from frame.core.execution.input_batch import TokenArrays
from frame.core.garbage_collection import paused_collection
from frame.core.interfaces.batch import AttentionOutput, ForwardBatch, HostView
from frame.core.interfaces.platform import Platform, SupportsGraphs
from frame.core.interfaces.rank_context import Track, track_silently

if TYPE_CHECKING:
    from frame.core.execution.input_batch import InputBatch
    from frame.core.interfaces.adapter_layers import StepAdapters
    from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, LatentProjections
    from frame.core.interfaces.batch import StateLayer
    from frame.core.interfaces.platform import CapturedGraph

    Layer = AttentionSpec | LatentProjections | StateLayer

_log = logging.getLogger(__name__)

_CALLS = ("run", "run_mla", "run_states")  # methods of a backend that layers call
_PADDING: dict[str, np.generic] = {"token_ids": np.int64(0), "positions": np.int64(0), "kv_slots": np.int64(0)}  # `TokenArrays`

# (method of the backend, layer, operands, batch) -> the tensor that the layer uses as the result
Intercept = Callable[..., torch.Tensor]


def piece_sizes(maximum: int) -> tuple[int, ...]:
    """The numbers of tokens to capture. They are closer together where matrix products are bound by
    arithmetic, because padding costs time there."""
    steps = [8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    while steps[-1] < maximum:
        steps += [steps[-1] * quarters // 4 for quarters in range(5, 9)]
    return (*(size for size in steps if size < maximum), maximum)


@dataclass(frozen=True, slots=True)
class _Attention:
    """The attention call of a layer: method of the backend, layer, operands as the preceding piece
    writes them, and output."""

    call: Callable[..., torch.Tensor]
    layer: Layer
    operands: tuple[torch.Tensor, ...]
    out: torch.Tensor

    def run(self, batch: ForwardBatch, tokens: int) -> None:
        """Compute the first `tokens` tokens. The output of others keeps its last, finite values."""
        result = self.call(self.layer, *(operand[:tokens] for operand in self.operands), batch)
        if result.data_ptr() != self.out.data_ptr():
            self.out[:tokens] = result


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The captured pieces of one size, the attention call after each piece but the last, and the
    hidden states."""

    graphs: list[CapturedGraph]
    attention: list[_Attention]
    hidden: torch.Tensor

    def replay(self, batch: ForwardBatch, tokens: int) -> torch.Tensor:
        for graph, attention in zip(self.graphs, self.attention, strict=False):
            graph.replay()
            attention.run(batch, tokens)
        self.graphs[-1].replay()
        return self.hidden


class PiecewiseGraphs:
    """The captured passes of one runner. Call `capture` once, then `place` and `run` in each step,
    all on the runner's stream and in inference mode."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        input_batch: InputBatch,
        backend: AttentionBackend,
        sizes: tuple[int, ...],
        platform: Platform,
    ) -> None:
        self._model_forward = forward
        self.adapters: StepAdapters | None = None  # the runner sets it
        self._input_batch = input_batch
        self._backend = backend
        self._platform = platform
        self._device = platform.device
        self._sizes = sizes
        self._smallest = np.searchsorted(np.array(sizes), np.arange(sizes[-1] + 1))  # by number of tokens: index of the size
        self._buffers = InputBuffers(sizes[-1], platform, _PADDING)
        self._batches = [self._batch(size) for size in sizes]
        self._outs: dict[tuple[Any, ...], torch.Tensor] = {}
        self._pieces: list[_Pieces] = []
        self._adapted: list[_Pieces] = []  # of steps with adapters

    @property
    def maximum(self) -> int:
        """The largest number of tokens that has graphs."""
        return self._sizes[-1]

    def capture(self, *, is_dry: bool = False, track: Track = track_silently) -> None:
        """Run and capture each size, the largest first, so that smaller sizes reuse its memory.
        is_dry: run each size only."""
        began, free = time.perf_counter(), self._platform.measure_memory().free
        platform = None if is_dry or not isinstance(self._platform, SupportsGraphs) else self._platform
        pool = None if platform is None else platform.create_graph_pool()
        with paused_collection(collects_first=True):
            for batch in track(self._batches[::-1], "capturing graphs of steps with prompts"):
                self._forward(replace(batch, plan=self._backend.plan(batch)))  # compiles and initialises kernels before the capture
                if platform is None:
                    continue
                self._pieces.insert(0, self._captured(batch, platform, pool))
                if self.adapters is not None:
                    self.adapters.is_active = True
                    self._forward(replace(batch, plan=self._backend.plan(batch)))
                    self._adapted.insert(0, self._captured(batch, platform, pool))
                    self.adapters.end_step()
        if not is_dry:
            _log.info(
                "graphs of steps with prompts: %d sizes up to %d tokens, %.1f s, %d MiB",
                len(self._sizes), self.maximum, time.perf_counter() - began, (free - self._platform.measure_memory().free) >> 20,
            )  # fmt: skip

    def place(self, tokens: TokenArrays[np.ndarray]) -> TokenArrays[torch.Tensor]:
        """Copy the arrays of a step of up to `maximum` tokens to where the pieces read them."""
        count = len(tokens.token_ids)
        self._buffers.write({name: getattr(tokens, name) for name in _PADDING}, self._sizes[self._smallest[count]])
        return TokenArrays(*(self._buffers.tensors[name][:count] for name in _PADDING))

    def extensions(self, tokens: int) -> dict[type, Any]:
        """The `AttentionOutput` of the step; empty if layers have outputs of different shapes."""
        if len(self._outs) != 1:
            return {}
        return {AttentionOutput: AttentionOutput(next(iter(self._outs.values()))[:tokens])}

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """The hidden states of a batch whose tokens were placed; valid until the next replay of any
        graph."""
        tokens = batch.num_tokens
        index = self._smallest[tokens]
        pieces, media = self._pieces, self._input_batch.media
        if media is not None:
            media.place_tokens(batch)
        if self.adapters is not None and self.adapters.is_active:
            self.adapters.place_tokens(batch, self._sizes[index])
            pieces = self._adapted
        if pieces:
            return pieces[index].replay(batch, tokens)[:tokens]

        def intercept(call: Callable[..., torch.Tensor], layer: Any, *rest: Any) -> torch.Tensor:
            attention = _Attention(call, layer, rest[:-1], self._out(layer, rest[0]))
            attention.run(batch, tokens)
            return attention.out

        with _intercepted(self._backend, intercept):
            return self._forward(self._batches[index])[:tokens]

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self.adapters is not None and self.adapters.is_active:
            self.adapters.plan_tokens(batch.num_tokens)
        return self._model_forward(batch)

    def _captured(self, batch: ForwardBatch, platform: SupportsGraphs, pool: object) -> _Pieces:
        graphs: list[CapturedGraph] = []
        attention: list[_Attention] = []

        def begin() -> None:
            graphs.append(platform.begin_capture(pool))

        def intercept(call: Callable[..., torch.Tensor], layer: Any, *rest: Any) -> torch.Tensor:
            platform.end_capture(graphs[-1])
            out = self._out(layer, rest[0])
            attention.append(_Attention(call, layer, tuple(platform.borrow(operand) for operand in rest[:-1]), out))
            begin()
            return out

        begin()
        try:
            with _intercepted(self._backend, intercept):
                hidden = self._forward(batch)
        finally:
            platform.end_capture(graphs[-1])
        return _Pieces(graphs, attention, platform.borrow(hidden))

    def _out(self, layer: Layer, first: torch.Tensor) -> torch.Tensor:
        """The output of a layer's attention, whose first operand is `first`. All layers and sizes
        share it, since each output is read before the next is written."""
        spec: Any = getattr(layer, "spec", layer)  # latent projections have a spec
        key = spec.num_heads, spec.v_head_dim, first.dtype
        if key not in self._outs:
            self._outs[key] = torch.zeros(self.maximum, spec.num_heads, spec.v_head_dim, dtype=first.dtype, device=self._device)
        return self._outs[key][: len(first)]

    def _batch(self, size: int) -> ForwardBatch:
        """The input batch of the pieces of one size, as dummy prompts over the reserved page."""
        table, inputs = self._input_batch.table, self._buffers.tensors
        max_length = (table.max_pages - 1) * table.page_size
        lens = np.full(-(-size // max_length), max_length, np.int32)
        lens[-1] -= lens.sum() - size
        slots = np.full(len(lens), table.padding_slot, np.int32)
        counts = torch.from_numpy(lens).to(self._device)
        starts = torch.from_numpy(np.append(0, np.cumsum(lens)).astype(np.int32)).to(self._device)
        groups, media = self._input_batch.groups, self._input_batch.media
        extensions = {} if groups is None else groups.pad_states(len(lens))
        return ForwardBatch(
            num_decodes=0,
            token_ids=inputs["token_ids"][:size],
            positions=inputs["positions"][:size],
            kv_slots=inputs["kv_slots"][:size],
            request_slots=torch.from_numpy(slots.astype(np.int64)).to(self._device),
            seq_lens=counts,
            query_lens=counts,
            query_starts=starts,
            page_table=table.pages,
            logits_indices=starts[:0].long(),
            kv=self._input_batch.kv,
            host=HostView(slots, lens, lens, table.host_pages),
            extensions=extensions if media is None else extensions | media.get_fixed(size),
        )


@contextmanager
def _intercepted(backend: AttentionBackend, intercept: Intercept) -> Iterator[None]:
    """Replace the attention methods of `backend` in the block by `intercept`, whose first argument
    is the original method."""
    for name in _CALLS:
        setattr(backend, name, partial(intercept, getattr(backend, name)))
    try:
        yield
    finally:
        for name in _CALLS:
            delattr(backend, name)
