"""The `flashmla` backend: decode steps of latent attention by DeepSeek's FlashMLA kernels. Another
backend computes prompts.

Calls `flash_mla.flash_mla_with_kvcache` (sgl-flash-mla 1.0.0). Depends on no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from frame.attention_backends.libraries import FLASHMLA
from frame.attention_backends.page_tables import PageTableBackend, PageTablePlan
from frame.core.interfaces.attention import AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.build import BuildContext


@dataclass(frozen=True, slots=True)
class FlashMLAKernels:
    """The library's functions."""

    decode: Callable[..., Any]  # flash_mla_with_kvcache
    schedule: Callable[..., Any]  # get_mla_metadata

    @classmethod
    def load(cls) -> FlashMLAKernels:
        """Import the library. Raises ImportError or OSError if it cannot be loaded."""
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        return cls(flash_mla_with_kvcache, get_mla_metadata)


class FlashMLABackend(PageTableBackend):
    """Absorbed decodes. The first layer of a step computes the library's schedule on the device, in
    a captured graph too."""

    capabilities: ClassVar[AttentionCapabilities] = FLASHMLA

    def __init__(self, context: BuildContext, options: BaseModel | None = None, kernels: FlashMLAKernels | None = None) -> None:
        super().__init__(context, options)
        self._kernels = kernels or FlashMLAKernels.load()
        self._schedule: Any = None
        self._first_layer: int | None = None

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        raise TypeError("Attention backend 'flashmla' computes latent attention only; use another backend for multi-head attention.")

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        plan: PageTablePlan = batch.plan
        rows = plan.decodes
        if rows is None or plan.extends is not None:
            raise TypeError("Attention backend 'flashmla' computes decodes only; name another backend for prompts.")
        (cached,) = batch.kv.layer(layer.spec.layer)
        if self._first_layer is None or layer.spec.layer <= self._first_layer:
            self._first_layer = layer.spec.layer
            self._schedule = self._kernels.schedule()[0]
        out, _ = self._kernels.decode(
            torch.cat((layer.absorb(q_nope), q_rope), dim=-1)[:, None],
            cached[:, :, None],
            rows.table,
            rows.seq_lens,
            layer.kv_lora_rank,
            self._schedule,
            softmax_scale=layer.spec.scale,
            causal=True,
            use_legacy=True,  # the kernels for compute capability 9.0, and the only ones that read an unquantized cache
        )
        return layer.unabsorb(out[:, 0])
