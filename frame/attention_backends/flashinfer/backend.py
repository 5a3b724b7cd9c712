"""The `flashinfer` backend: decodes and extends by FlashInfer's wrappers; latents absorbed, or
expanded where that costs less.

Depends on rows, pages and layer shapes, on no request. `wrappers.py` makes the library calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from pydantic import BaseModel

from frame.attention_backends.flashinfer.library import Library
from frame.attention_backends.flashinfer.page_lists import PageBuffers, PageLists, list_pages
from frame.attention_backends.flashinfer.wrappers import NO_WINDOW, MHAShape, MLAShape, Wrapper, Wrappers
from frame.attention_backends.libraries import FLASHINFER, FlashInferOptions
from frame.attention_backends.shared import expand_latents, locate_keys, make_rows_contiguous, replace_non_finite
from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import AttentionOutput, ForwardBatch
from frame.core.interfaces.build import BuildContext
from frame.kernels import nvidia


class StepPlan:
    """The planned wrappers of one step, by layer shape. Page lists are made when the first shape
    needs them."""

    def __init__(self, batch: ForwardBatch, buffers: PageBuffers | None = None) -> None:
        self.batch = batch
        self.buffers = buffers  # of a captured step, which has decodes only
        self.num_decodes = batch.num_decodes
        self.heads: dict[MHAShape, tuple[Wrapper | None, Wrapper | RaggedExtend | None]] = {}  # (decodes, extends)
        # (absorbed rows, expanded extends)
        self.latents: dict[MLAShape, tuple[Wrapper | None, RaggedExtend | None]] = {}
        self._lists: dict[tuple[int, int], PageLists] = {}

    def get_lists(self, first: int, stop: int) -> PageLists | None:
        """Page lists of rows `first` … `stop - 1`; None for an empty range."""
        if first == stop:
            return None
        row_lists = self._lists.get((first, stop))
        if row_lists is None:
            row_lists = list_pages(self.batch, first, stop, self.buffers)
            self._lists[first, stop] = row_lists
        return row_lists


@dataclass(frozen=True, slots=True)
class RaggedExtend:
    """Extends over contiguous ("ragged") keys and values, or over those expanded from latents.

    `places`: KV slots of the keys; None: the keys are this step's own.
    """

    wrapper: Wrapper
    places: torch.Tensor | None


class FlashInferBackend(AttentionBackend):
    """FlashInfer's kernels over pages. `plan` is a `StepPlan`."""

    capabilities: ClassVar[AttentionCapabilities] = FLASHINFER

    def __init__(self, context: BuildContext, options: BaseModel | None = None, library: Library | None = None) -> None:
        super().__init__(context, options)
        settings = options if isinstance(options, FlashInferOptions) else FlashInferOptions()
        device = context.device
        self._capability = nvidia.get_compute_capability(device) if device.type == "cuda" else (9, 0)
        self._wrappers = Wrappers(library, device, self._capability, settings.workspace_mib << 20)
        self._shapes: list[MHAShape | MLAShape] = []  # the shapes of this model's layers, collected in the first step
        self._layers: dict[int, tuple[AttentionSpec, MHAShape]] = {}
        self._buffers: PageBuffers | None = None
        self._first_layer: int | None = None  # the layer that writes the page lists in a captured step

    def prepare(self, layers: Sequence[AttentionSpec | LatentProjections], on_compile: Callable[[str], None] | None = None) -> None:
        """Compile the modules of the layers' shapes, in parallel."""
        dtype, kv_dtype = self.context.dtype, self.context.kv_dtype or self.context.dtype
        shapes = [_mha_shape(layer, dtype, kv_dtype) if isinstance(layer, AttentionSpec) else _mla_shape(layer, dtype) for layer in layers]
        self._wrappers.compile(shapes, on_compile)

    def plan(self, batch: ForwardBatch) -> StepPlan:
        return self._plan_shapes(StepPlan(batch))

    def capture_plan(self, batch: ForwardBatch) -> StepPlan:
        if self._buffers is None:
            limits = self.context.limits
            pages = -(-limits.max_context // limits.page_size) + 1
            self._buffers = PageBuffers.create(limits.max_decodes, pages, self.context.device)
        return self._plan_shapes(StepPlan(batch, self._buffers))

    def replay_plan(self, plan: StepPlan, batch: ForwardBatch) -> None:
        self._plan_shapes(StepPlan(batch, self._buffers))

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        cache = batch.kv.layer(spec.layer)
        known = self._layers.get(spec.layer)
        if known is None or known[0] is not spec:
            known = spec, _mha_shape(spec, q.dtype, cache[0].dtype)
            self._layers[spec.layer] = known
        shape, plan = known[1], self._plan(spec, batch)
        if shape in plan.heads:
            return _attend(batch, shape, spec, (q, k, v), cache)
        with self._first_use(shape, plan):
            return _attend(batch, shape, spec, (q, k, v), cache)

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        spec, shape = layer.spec, _mla_shape(layer, q_nope.dtype)
        plan = self._plan(spec, batch)
        if shape not in plan.latents:
            with self._first_use(shape, plan):
                pass
        absorbed, expanded = plan.latents[shape]
        (cached,) = batch.kv.layer(spec.layer)
        if expanded is None:
            assert absorbed is not None  # a step has at least one row
            return _attend_absorbed(absorbed, layer, q_nope, q_rope, cached)
        out = AttentionOutput.get_buffer(batch, q_nope, spec.num_heads, spec.v_head_dim)
        first = plan.num_decodes
        if absorbed is not None:
            out[:first] = _attend_absorbed(absorbed, layer, q_nope[:first], q_rope[:first], cached)
        rows = latent[first:] if expanded.places is None else cached.view(-1, cached.shape[-1]).index_select(0, expanded.places)
        q = torch.cat((q_nope[first:], q_rope[first:]), dim=-1)
        expanded.wrapper.run(q, *expand_latents(layer, rows), out=out[first:])
        return out

    def _plan(self, spec: AttentionSpec, batch: ForwardBatch) -> StepPlan:
        """The step's plan. In a captured step the first layer writes the page lists, so that each
        replay writes its own."""
        plan: StepPlan = batch.plan
        if self._first_layer is None or spec.layer < self._first_layer:
            self._first_layer = spec.layer
        if plan.buffers is not None and spec.layer == self._first_layer:
            plan.buffers.write_lists(batch)
        return plan

    def _plan_shapes(self, plan: StepPlan) -> StepPlan:
        for shape in self._shapes:
            self._plan_shape(shape, plan)
        return plan

    def _plan_shape(self, shape: MHAShape | MLAShape, plan: StepPlan) -> None:
        batch, decodes, page_size = plan.batch, plan.num_decodes, plan.batch.kv.page_size
        rows = batch.num_rows
        if isinstance(shape, MHAShape):
            absorbed_lists, others = plan.get_lists(0, decodes), plan.get_lists(decodes, rows)
            decode = None
            if absorbed_lists is not None and plan.buffers is not None:
                decode = self._wrappers.plan_captured_decode(shape, absorbed_lists, page_size, plan.buffers)
            elif absorbed_lists is not None:
                decode = self._wrappers.plan_decode(shape, absorbed_lists, page_size)
            extends: Wrapper | RaggedExtend | None = None
            if others is not None and self._wrappers.prefers_ragged(shape, others):
                extends = _plan_ragged_extend(plan, lambda *starts: self._wrappers.plan_ragged(shape, *starts))
            elif others is not None:
                extends = self._wrappers.plan_extend(shape, others, page_size)
            plan.heads[shape] = decode, extends
            return
        expanded = (
            _plan_ragged_extend(plan, lambda *starts: self._wrappers.plan_expanded(shape, *starts))
            if decodes < rows and self._expands(shape, batch)
            else None
        )
        absorbed_lists = plan.get_lists(0, decodes if expanded is not None else rows)
        absorbed = None if absorbed_lists is None else self._wrappers.plan_latent(shape, absorbed_lists, page_size, plan.buffers)
        plan.latents[shape] = absorbed, expanded

    def _expands(self, shape: MLAShape, batch: ForwardBatch) -> bool:
        """Whether the expanded form of this step's extends needs fewer multiplications than the
        absorbed form, and fits into `expanded_bytes`."""
        first = batch.num_decodes
        queries, keys = (lengths[first:].astype(np.int64) for lengths in (batch.host.query_lens, batch.host.seq_lens))
        nope = shape.width - shape.rope
        projected = nope + shape.value_width
        size = int(keys.sum()) * shape.heads * (projected + shape.rope) * shape.dtype.itemsize
        if not shape.expands_latents or size > self.capabilities.expanded_bytes:
            return False
        pairs = int((queries * (2 * keys - queries + 1)).sum()) // 2
        expanded = int(keys.sum()) * shape.rank * projected + pairs * (projected + shape.rope)
        absorbed = int(queries.sum()) * shape.rank * projected + pairs * (2 * shape.rank + shape.rope)
        return expanded <= absorbed

    @contextmanager
    def _first_use(self, shape: MHAShape | MLAShape, plan: StepPlan) -> Iterator[None]:
        """The first step of a shape: compile its kernels and make its wrappers, which may wait for
        the device. No later step does."""
        if self.context.device.type == "cuda" and nvidia.is_capturing():
            raise RuntimeError("Attention backend 'flashinfer' got a new layer shape in a captured step; run a step without a graph first.")
        with nvidia.allow_sync(self.context.device):
            self._wrappers.compile([shape])
            self._shapes.append(shape)
            self._plan_shape(shape, plan)
            yield


def _mha_shape(spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> MHAShape:
    window = NO_WINDOW if spec.sliding_window is None else spec.sliding_window - 1
    return MHAShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, window, spec.soft_cap or 0.0, spec.scale, dtype, kv_dtype)


def _mla_shape(layer: LatentProjections, dtype: torch.dtype) -> MLAShape:
    spec = layer.spec
    sizes = spec.num_heads, layer.kv_lora_rank, layer.qk_rope_head_dim, spec.head_dim, spec.v_head_dim
    return MLAShape(*sizes, spec.scale, dtype)


def _plan_ragged_extend(plan: StepPlan, planned: Callable[[torch.Tensor, torch.Tensor], Wrapper]) -> RaggedExtend:
    """All extends of a step over contiguous keys; `planned` plans a wrapper for the query and key
    starts (host int32 [rows + 1])."""
    batch, first = plan.batch, plan.num_decodes
    host = batch.host
    lists = plan.get_lists(first, batch.num_rows)
    assert lists is not None  # the caller has checked that there are extends
    if (host.seq_lens[first:] == host.query_lens[first:]).all():
        return RaggedExtend(planned(lists.query_starts, lists.query_starts), None)
    starts = np.zeros(lists.rows + 1, np.int32)
    np.cumsum(host.seq_lens[first:], out=starts[1:])
    key_starts = torch.from_numpy(starts)
    if batch.token_ids.device.type == "cuda":
        key_starts = key_starts.pin_memory()
    return RaggedExtend(planned(lists.query_starts, key_starts), locate_keys(batch, first, int(starts[-1])))


def _attend(
    batch: ForwardBatch,
    shape: MHAShape,
    spec: AttentionSpec,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """`step`: queries, keys and values of the step's tokens; the cache holds the keys and values
    too."""
    plan: StepPlan = batch.plan
    (decodes, extends), first = plan.heads[shape], plan.num_decodes
    scales = {} if shape.kv_dtype == shape.dtype else {"k_scale": spec.k_scale, "v_scale": spec.v_scale}
    q = make_rows_contiguous(step[0])
    out = AttentionOutput.get_buffer(batch, q, spec.num_heads, spec.v_head_dim)
    if decodes is not None:
        decodes.run(q[:first], cache, out=out[:first], **scales)
    if extends is None:
        return out
    extended, written = (q[first:], out[first:]) if first else (q, out)
    if not isinstance(extends, RaggedExtend):
        extends.run(extended, cache, out=written, **scales)
    elif extends.places is None:
        extends.wrapper.run(extended, make_rows_contiguous(step[1][first:]), replace_non_finite(step[2][first:]), out=written)
    else:
        keys, values = (lengths.flatten(0, 1).index_select(0, extends.places) for lengths in cache)
        extends.wrapper.run(extended, keys, replace_non_finite(values, in_place=True), out=written)
    return out


def _attend_absorbed(
    wrapper: Wrapper, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: torch.Tensor
) -> torch.Tensor:
    """Latent attention with absorbed queries -> [tokens, heads, v_head_dim]."""
    rank = layer.kv_lora_rank
    q = make_rows_contiguous(layer.absorb(q_nope))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return layer.unabsorb(wrapper.run(q, make_rows_contiguous(q_rope), cached[..., :rank], cached[..., rank:], out=out))
