"""The `trtllm_mha` backend: multi-head attention by TensorRT-LLM's kernels for Blackwell, through
FlashInfer's functions.

Follows the arguments of flashinfer-python 0.6.12 and 0.7.2 (`decode.py`, `prefill.py`). Depends on
no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from frame.attention_backends.libraries import TRTLLM_MHA, WorkspaceOptions
from frame.attention_backends.page_tables import PageTableBackend, PageTablePlan, RowRange
from frame.attention_backends.shared import make_rows_contiguous
from frame.core.interfaces.attention import AttentionCapabilities, AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.build import BuildContext


@dataclass(frozen=True, slots=True)
class MHAKernels:
    """The library's functions."""

    decode: Callable[..., Any]  # trtllm_batch_decode_with_kv_cache
    context: Callable[..., Any]  # trtllm_batch_context_with_kv_cache

    @classmethod
    def load(cls) -> MHAKernels:
        """Import the library. Raises ImportError if a function is missing."""
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        return cls(trtllm_batch_decode_with_kv_cache, trtllm_batch_context_with_kv_cache)


class TrtllmMHABackend(PageTableBackend):
    """Decodes use the generation kernels, extends the context kernels."""

    capabilities: ClassVar[AttentionCapabilities] = TRTLLM_MHA
    table_multiple = 128

    def __init__(self, context: BuildContext, options: BaseModel | None = None, kernels: MHAKernels | None = None) -> None:
        super().__init__(context, options)
        self._kernels = kernels or MHAKernels.load()
        size = (options if isinstance(options, WorkspaceOptions) else WorkspaceOptions()).workspace_mib << 20
        # the kernels' counters must start at zero
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=context.device)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        plan: PageTablePlan = batch.plan
        q = make_rows_contiguous(q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        cache = batch.kv.layer(spec.layer)
        if (row_range := plan.decodes) is not None:
            self._kernels.decode(max_seq_len=row_range.max_keys, backend="trtllm-gen", **self._arguments(spec, q, cache, out, row_range))
        if (row_range := plan.extends) is not None:
            self._kernels.context(
                max_q_len=row_range.max_queries,
                max_kv_len=row_range.max_keys,
                batch_size=row_range.rows,
                cum_seq_lens_q=row_range.query_starts,
                cum_seq_lens_kv=row_range.compute_key_starts(),
                causal=True,
                **self._arguments(spec, q, cache, out, row_range),
            )
        return out

    def _arguments(
        self, spec: AttentionSpec, q: torch.Tensor, cache: tuple[torch.Tensor, ...], out: torch.Tensor, row_range: RowRange
    ) -> dict[str, Any]:
        return {
            "query": q[row_range.tokens],
            "kv_cache": cache,
            "workspace_buffer": self._workspace,
            "block_tables": row_range.table,
            "seq_lens": row_range.seq_lens,
            "bmm1_scale": spec.scale,
            "bmm2_scale": 1.0,
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "out": out[row_range.tokens],
            "sinks": None if spec.sinks is None else spec.sinks.float(),
            "kv_layout": "NHD",
        }
