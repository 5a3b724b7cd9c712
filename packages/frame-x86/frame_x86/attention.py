"""The attention backends `avx512` and `avx2`: decodes of bfloat16 over the paged cache.

Loaded by their records. Another backend computes prompts. Must not know a request and a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionBackend, AttentionSpec
from frame.core.interfaces.batch import AttentionOutput, ForwardBatch
from frame_x86 import ATTENTION, AVX2_ATTENTION, NEEDS, X86AttentionCapabilities
from frame_x86.library import load_library

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.rank_context import RankContext


class Avx512Attention(AttentionBackend):
    """Rows of one token each. It needs no plan."""

    capabilities: ClassVar[X86AttentionCapabilities] = ATTENTION

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        name = self.capabilities.name
        library = load_library(name)
        if library is None:
            raise ConfigurationError(f"this CPU has no {NEEDS[name]}: set another attention.backend than {name}.")
        self._attend = library.frame_x86_attend

    def plan(self, batch: ForwardBatch) -> None:
        return None

    def capture_plan(self, batch: ForwardBatch) -> None:
        return None

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, (keys, values) = q.contiguous(), batch.kv.layer(spec.layer)
        rows, heads, dim = q.shape
        out = AttentionOutput.get_buffer(batch, q, heads, dim)
        table = batch.page_table
        self._attend(
            *(q.data_ptr(), rows, heads, spec.num_kv_heads, dim, keys.data_ptr(), values.data_ptr(), keys.shape[1]),
            *(table.data_ptr(), table.stride(0), batch.request_slots.data_ptr(), batch.seq_lens.data_ptr()),
            *(spec.sliding_window or 0, spec.scale, out.data_ptr(), torch.get_num_threads()),
        )
        return out


class Avx2Attention(Avx512Attention):
    """By AVX2."""

    capabilities: ClassVar[X86AttentionCapabilities] = AVX2_ATTENTION
