"""The `triton` backend: multi-head and latent attention by the kernels of this folder.

Selects the form of latent attention and passes views of queries and cache to the launchers. Depends
on no request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import BaseModel

from frame.attention_backends import TRITON, TritonOptions
from frame.attention_backends.shared import make_rows_contiguous
from frame.attention_backends.triton.decode_launch import DecodeLauncher
from frame.attention_backends.triton.dequantize import Dequantizer
from frame.attention_backends.triton.extend_launch import ExtendLauncher
from frame.attention_backends.triton.invariant.split_launch import SplitLauncher
from frame.attention_backends.triton.operands import Operands
from frame.attention_backends.triton.plan import StepPlan
from frame.attention_backends.triton.shared_prefixes import SharedPrefixes
from frame.attention_backends.triton.sparse_kernel import attend_sparse
from frame.attention_backends.triton.tile_sizes import DeviceLimits, split_width
from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import AttentionOutput, ForwardBatch, SparseKeys, TreeMask
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.media import MediaSpans
from frame.kernels import INTERPRETED

DEQUANTIZED_QUERIES = 128  # queries for each key, on average, from which on keys are dequantized once


class TritonBackend(AttentionBackend):
    """Triton kernels that read the page table. `plan` is a `StepPlan`."""

    capabilities: ClassVar[AttentionCapabilities] = TRITON

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        device, limits = context.device, context.limits
        if device.type == "cpu" and not INTERPRETED:
            raise ValueError(
                "Attention backend 'triton' runs on the cpu only under TRITON_INTERPRET=1; use device cuda or another backend."
            )
        shares = options.share_prefixes if isinstance(options, TritonOptions) else True
        self._limits = device_limits = DeviceLimits.from_device(device)
        self._prefixes = SharedPrefixes(device, limits.max_decodes)
        self._shares = shares
        self._decodes = DecodeLauncher(device, device_limits, limits.max_decodes, shares, 1 + limits.max_drafted if shares else 1)
        self._extends = ExtendLauncher(device, device_limits)
        self._dequantizer = Dequantizer(device)
        self._splits = SplitLauncher(device, device_limits) if context.deterministic else None

    def plan(self, batch: ForwardBatch) -> StepPlan:
        self._share(batch)
        return StepPlan(batch, self._prefixes)

    def capture_plan(self, batch: ForwardBatch) -> StepPlan:
        return self.plan(batch)

    def replay_plan(self, plan: StepPlan, batch: ForwardBatch) -> None:
        """Update the shared prefixes. The kernels read lengths, pages and slots from the batch."""
        self._share(batch)

    def _share(self, batch: ForwardBatch) -> None:
        if self._splits is None and self._shares and not batch.group and batch.get(TreeMask) is None:
            self._prefixes.update_groups(batch.host, batch.num_decodes, batch.kv.page_size)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q = make_rows_contiguous(q)
        cached_k, cached_v = [piece.flatten(0, 1) for piece in batch.kv.layer(spec.layer)]
        page_size, scales = batch.kv.page_size, _scales(spec, cached_k, batch)
        plan, starts, ragged = _plan(batch), None, None
        if self._splits is not None:
            return self._attend_splits(spec, _operands(q, cached_k, cached_v, page_size)._replace(scales=scales), batch)
        if not len(plan.query_lens):
            pass
        elif cached_k.dtype == k.dtype:
            ragged = _operands(q, make_rows_contiguous(k), make_rows_contiguous(v), 0)
        elif self._dequantizes(spec, plan, k.element_size()):
            # with this step's keys, which differ from those in the cache by rounding
            k, v = self._dequantize(spec, (cached_k, cached_v), k.dtype, batch)
            ragged, starts = _operands(q, k, v, 0)._replace(has_all_keys=True), plan.key_starts
        out = AttentionOutput.get_buffer(batch, q, spec.num_heads, spec.v_head_dim)
        self._launch(spec, _operands(q, cached_k, cached_v, page_size)._replace(scales=scales), ragged, out, batch, starts)
        return out

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        spec, plan, rank = layer.spec, _plan(batch), layer.kv_lora_rank
        (cached,) = batch.kv.layer(spec.layer)
        cached = cached.view(-1, cached.shape[-1])
        if (chosen := batch.get(SparseKeys)) is not None:
            q = make_rows_contiguous(layer.absorb(q_nope))
            sparse = q, make_rows_contiguous(q_rope), cached, chosen.slots
            k_scale = spec.k_scale if cached.dtype == torch.float8_e4m3fn else 1.0
            units = next(iter(_scales(spec, cached, batch)), None)
            memory, is_fixed = self._limits.shared_memory, self._splits is not None
            return layer.unabsorb(attend_sparse(*sparse, spec.scale, k_scale, memory, units, is_fixed=is_fixed))
        if self._splits is not None:
            q, scales = make_rows_contiguous(layer.absorb(q_nope)), tuple([piece.unsqueeze(1) for piece in _scales(spec, cached, batch)])
            parts = cached[:, None, :rank], cached[:, None, rank:]
            operands = Operands(q, make_rows_contiguous(q_rope), *parts, None, batch.kv.page_size, scales=scales)
            return layer.unabsorb(self._attend_splits(replace(spec, v_head_dim=rank), operands, batch))
        expands = self._expands(layer, plan, latent.element_size())
        absorbed = plan.num_decodes if expands else q_nope.shape[0]  # number of tokens; decodes come first
        decoded = None
        if absorbed:
            keys = cached[:, None]
            q = make_rows_contiguous(layer.absorb(q_nope[:absorbed]))
            scales = tuple([piece.unsqueeze(1) for piece in _scales(spec, cached, batch)])
            halves = keys[..., :rank], keys[..., rank:]
            operands = Operands(q, make_rows_contiguous(q_rope), *halves, None, batch.kv.page_size, scales=scales)
            attended = q.new_empty(absorbed, spec.num_heads, rank)
            self._launch(spec, operands, None, attended, batch, extends=not expands)
            decoded = layer.unabsorb(attended)
            if absorbed == q_nope.shape[0]:
                return decoded
        out = AttentionOutput.get_buffer(batch, q_nope, spec.num_heads, spec.v_head_dim)
        if decoded is not None:
            out[:absorbed] = decoded
        self._extend_expanded(layer, q_nope, q_rope, latent, cached, batch, out)
        return out

    def _launch(
        self,
        spec: AttentionSpec,
        cached: Operands,
        ragged: Operands | None,
        out: torch.Tensor,
        batch: ForwardBatch,
        key_starts: torch.Tensor | None = None,
        extends: bool = True,
    ) -> None:
        """All rows, or only the decodes. `key_starts`: see `ExtendLauncher.run`."""
        plan = _plan(batch)
        if plan.num_decodes:
            self._decodes.run(spec, cached, out, batch, plan)
        if extends and len(plan.query_lens):
            self._extends.run(spec, None if ragged and ragged.has_all_keys else cached, ragged, out, batch, plan, key_starts)

    def _attend_splits(self, spec: AttentionSpec, cached: Operands, batch: ForwardBatch) -> torch.Tensor:
        """All tokens in the batch-invariant form."""
        if batch.get(TreeMask) is not None or batch.get(MediaSpans) is not None:
            raise ValueError("execution.deterministic computes no masks of trees and of media; set it to false")
        assert self._splits is not None
        out = AttentionOutput.get_buffer(batch, cached.q1, spec.num_heads, spec.v_head_dim)
        self._splits.run(spec, cached, out, batch, _plan(batch))
        return out

    def _dequantizes(self, spec: AttentionSpec, plan: StepPlan, itemsize: int) -> bool:
        """Whether the extends of a quantized cache read dequantized keys and values: many queries
        multiply each key, no window leaves most of them out, and they fit into the capabilities'
        bound. Otherwise the keys are read in place, which takes twice to three times as long."""
        keys = int(plan.key_lens.sum())
        size = keys * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * itemsize
        maximum = self.capabilities.bound_prompt_bytes("mha", self._limits.memory, is_quantized=True)
        return spec.sliding_window is None and plan.num_pairs >= max(1, keys) * DEQUANTIZED_QUERIES and size <= maximum

    def _dequantize(
        self, spec: AttentionSpec, pieces: tuple[torch.Tensor, ...], dtype: torch.dtype, batch: ForwardBatch
    ) -> tuple[torch.Tensor, ...]:
        """The keys of all extends, of each part of a quantized cache: rows in `dtype`."""
        places, scales = _plan(batch).key_places, _scales(spec, pieces[0], batch)
        factors = spec.k_scale, spec.v_scale
        return tuple(
            [
                self._dequantizer.gather(piece, places, factors[index], scales[index] if scales else None, dtype)
                for index, piece in enumerate(pieces)
            ]
        )

    def _extend_expanded(
        self,
        layer: LatentProjections,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        cached: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """All extends over keys and values expanded from latents."""
        plan, rank = _plan(batch), layer.kv_lora_rank
        if not plan.has_prefixes:
            rows = latent[plan.num_decodes :]
        elif cached.dtype == latent.dtype:
            rows = cached.index_select(0, plan.key_places)
        else:
            (rows,) = self._dequantize(layer.spec, (cached,), latent.dtype, batch)
        k_nope, v = layer.expand(rows[:, :rank])
        k_rope = rows[:, None, rank:].expand(-1, layer.spec.num_heads, -1)  # one key for all heads: stride 0
        operands = Operands(
            make_rows_contiguous(q_nope),
            make_rows_contiguous(q_rope),
            make_rows_contiguous(k_nope),
            k_rope,
            make_rows_contiguous(v),
            page_size=0,
            has_all_keys=True,
        )
        self._extends.run(layer.spec, None, operands, out, batch, plan, plan.key_starts)

    def _expands(self, layer: LatentProjections, plan: StepPlan, itemsize: int) -> bool:
        """Whether the expanded form of this step's extends needs fewer multiplications than the
        absorbed form, and fits into `expanded_bytes`."""
        spec, rank = layer.spec, layer.kv_lora_rank
        keys, queries = int(plan.key_lens.sum()), int(plan.query_lens.sum())
        projected = layer.qk_nope_head_dim + spec.v_head_dim
        if not queries or keys * spec.num_heads * projected * itemsize > self.capabilities.expanded_bytes:
            return False
        expanded = keys * rank * projected + plan.num_pairs * (projected + layer.qk_rope_head_dim)
        absorbed = queries * rank * projected + plan.num_pairs * (2 * rank + layer.qk_rope_head_dim)
        return expanded < absorbed  # equal for heads as wide as the latent


def _plan(batch: ForwardBatch) -> StepPlan:
    plan: StepPlan = batch.plan
    return plan


def _scales(spec: AttentionSpec, cached: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
    """The scales of an int8 cache by slot; none for another."""
    if cached.dtype != torch.int8:
        return ()
    return tuple([piece.flatten(0, 1) for piece in batch.kv.scales(spec.layer)])


def _operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int) -> Operands:
    """Multi-head queries, keys and values, queries and keys in two parts if their width is no power
    of two."""
    first, rest = split_width(q.shape[-1])
    if not rest:
        return Operands(q, None, k, None, v, page_size)
    return Operands(q[..., :first], q[..., first:], k[..., :first], k[..., first:], v, page_size)
