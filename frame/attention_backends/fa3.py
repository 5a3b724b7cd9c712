"""The `fa3` backend: FlashAttention-3 (arXiv 2407.08608) from its own library, over a paged cache,
with absorbed latents.

Calls `flash_attn_interface.flash_attn_with_kvcache` (Dao-AILab/flash-attention, `hopper/`). Depends
on no request.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from frame.attention_backends.libraries import FA3
from frame.attention_backends.page_tables import PageTableBackend, PageTablePlan
from frame.attention_backends.shared import make_rows_contiguous
from frame.core.interfaces.attention import AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.build import BuildContext


class FlashAttention3Backend(PageTableBackend):
    """One library call for a step's decodes and one for its extends."""

    capabilities: ClassVar[AttentionCapabilities] = FA3

    def __init__(self, context: BuildContext, options: BaseModel | None = None, attend: Callable[..., Any] | None = None) -> None:
        super().__init__(context, options)
        if attend is None:
            attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
        self._attend: Callable[..., Any] = attend

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        keys, values = batch.kv.layer(spec.layer)
        return self._call(spec, batch.plan, make_rows_contiguous(q), keys, values)

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        (cached,) = batch.kv.layer(layer.spec.layer)
        keys = cached[:, :, None]  # one key-value head
        rank = layer.kv_lora_rank
        absorbed = make_rows_contiguous(layer.absorb(q_nope))
        return layer.unabsorb(
            self._call(layer.spec, batch.plan, make_rows_contiguous(q_rope), keys[..., rank:], keys[..., :rank], absorbed)
        )

    def _call(
        self,
        spec: AttentionSpec,
        plan: PageTablePlan,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        against_values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`against_values`: further query parts that are scored against the values (the library's
        `qv`), for absorbed latents."""
        outs: list[torch.Tensor] = []
        for rows in (plan.decodes, plan.extends):
            if rows is None:
                continue
            out = self._attend(
                q[rows.tokens],
                keys,
                values,
                qv=None if against_values is None else against_values[rows.tokens],
                cache_seqlens=rows.seq_lens,
                page_table=rows.table,
                cu_seqlens_q=rows.query_starts,
                max_seqlen_q=rows.max_queries,
                softmax_scale=spec.scale,
                causal=True,
                window_size=(-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
                softcap=spec.soft_cap or 0.0,
            )
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)
