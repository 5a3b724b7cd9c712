"""The `trtllm_mla` backend: latent attention by TensorRT-LLM's kernels for Blackwell, through
FlashInfer's functions.

Decodes use absorbed queries; extends use expanded keys and values. Follows the arguments of
flashinfer-python 0.6.12 and 0.7.2 (`mla/_core.py`, `prefill.py`). Depends on no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from frame.attention_backends.libraries import TRTLLM_MLA, WorkspaceOptions
from frame.attention_backends.page_tables import ExpandedChunk, PageTableBackend, PageTablePlan, RowRange, gather_latents
from frame.attention_backends.shared import expand_latents
from frame.core.interfaces.attention import AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.build import BuildContext


@dataclass(frozen=True, slots=True)
class MLAKernels:
    """The library's functions."""

    decode: Callable[..., Any]  # trtllm_batch_decode_with_kv_cache_mla
    ragged: Callable[..., Any]  # trtllm_ragged_attention_deepseek

    @classmethod
    def load(cls) -> MLAKernels:
        """Import the library. Raises ImportError if a function is missing."""
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla
        from flashinfer.prefill import trtllm_ragged_attention_deepseek

        return cls(trtllm_batch_decode_with_kv_cache_mla, trtllm_ragged_attention_deepseek)


class TrtllmMLABackend(PageTableBackend):
    """Absorbed decodes, expanded extends."""

    capabilities: ClassVar[AttentionCapabilities] = TRTLLM_MLA
    table_multiple = 128
    expands_latents = True

    def __init__(self, context: BuildContext, options: BaseModel | None = None, kernels: MLAKernels | None = None) -> None:
        super().__init__(context, options)
        self._kernels = kernels or MLAKernels.load()
        size = (options if isinstance(options, WorkspaceOptions) else WorkspaceOptions()).workspace_mib << 20
        # the kernels' counters must start at zero
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=context.device)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        raise TypeError("Attention backend 'trtllm_mla' computes latent attention only; use trtllm_mha for multi-head attention.")

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        plan: PageTablePlan = batch.plan
        (cached,) = batch.kv.layer(layer.spec.layer)
        decoded = None
        if plan.decodes is not None:
            decoded = self._decode(layer, q_nope[plan.decodes.tokens], q_rope[plan.decodes.tokens], cached, plan.decodes)
            if not plan.chunks:
                return decoded
        out = q_nope.new_empty(q_nope.shape[0], layer.spec.num_heads, layer.spec.v_head_dim)
        if decoded is not None:
            out[: decoded.shape[0]] = decoded
        for chunk in plan.chunks:
            q = torch.cat((q_nope[chunk.row_range.tokens], q_rope[chunk.row_range.tokens]), dim=-1)
            self._extend(layer, q, gather_latents(chunk, latent, cached), chunk, out[chunk.row_range.tokens])
        return out

    def _decode(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: torch.Tensor, row_range: RowRange
    ) -> torch.Tensor:
        query = torch.cat((layer.absorb(q_nope), q_rope), dim=-1)[:, None]
        out = query.new_empty(*query.shape[:3], layer.kv_lora_rank)
        self._kernels.decode(
            query=query,
            kv_cache=cached,
            workspace_buffer=self._workspace,
            qk_nope_head_dim=layer.qk_nope_head_dim,
            kv_lora_rank=layer.kv_lora_rank,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            block_tables=row_range.table,
            seq_lens=row_range.seq_lens,
            max_seq_len=row_range.max_keys,
            out=out,
            bmm1_scale=layer.spec.scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
        )
        return layer.unabsorb(out[:, 0])

    def _extend(self, layer: LatentProjections, q: torch.Tensor, latents: torch.Tensor, chunk: ExpandedChunk, out: torch.Tensor) -> None:
        row_range = chunk.row_range
        key, value = expand_latents(layer, latents)
        self._kernels.ragged(
            query=q,
            key=key,
            value=value,
            workspace_buffer=self._workspace,
            seq_lens=row_range.seq_lens,
            max_q_len=row_range.max_queries,
            max_kv_len=row_range.max_keys,
            bmm1_scale=layer.spec.scale,
            bmm2_scale=1.0,
            o_sf_scale=-1.0,
            batch_size=row_range.rows,
            window_left=-1,
            cum_seq_lens_q=row_range.query_starts,
            cum_seq_lens_kv=row_range.compute_key_starts(),
            enable_pdl=None,
            is_causal=True,
            return_lse=False,
            out=out,
        )
