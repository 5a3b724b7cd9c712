"""Multi-head attention of a decoder layer: projections, optional norms of queries and keys, rotation, cache store, backend.

Knows no page and no kernel: it stores through the batch and lets the backend compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.attention import AttentionSpec
from frame.models.layers.kv_scales import KVScales
from frame.models.layers.linear import HeadLayout, QKVLinear, RowLinear
from frame.models.layers.parameter import ShardedParameter

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import ModelFacts
    from frame.models.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What differs between architectures. `qk_norm`: epsilon of a norm over each head's queries and keys, None for none."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: float | None = None
    sliding_window: int | None = None
    scale: float | None = None  # None: head_dim ** -0.5


class Attention(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]; `prefix` holds q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm)."""

    def __init__(
        self, context: BuildContext, facts: ModelFacts, layer: int, prefix: str, rotary: Rotary, options: AttentionOptions
    ) -> None:
        super().__init__()
        if context.attention is None:
            raise TypeError("a model's context needs an attention backend")
        heads = HeadLayout(context, facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.backend = context.attention
        self.stores_kv = context.attention.capabilities.stores_kv
        self.rotary = rotary
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=facts.head_dim,
            v_head_dim=facts.head_dim,
            scale=options.scale if options.scale is not None else facts.head_dim**-0.5,
            sliding_window=options.sliding_window,
        )
        names = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv_proj = QKVLinear(context, names, facts.hidden_size, heads, options.qkv_bias)
        self.o_proj = RowLinear(context, f"{prefix}.o_proj", facts.num_heads * facts.head_dim, facts.hidden_size, options.out_bias)
        self.qk_norm = QKNorm(context, prefix, heads, options.qk_norm) if options.qk_norm is not None else None
        self.kv_scales = KVScales(prefix)

    def finish(self) -> None:
        """Take the cache's scales over."""
        self.spec = self.kv_scales.put_into(self.spec)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        spec = self.spec
        rotated = spec.num_heads + spec.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (-1, spec.head_dim))  # [tokens, q heads + 2 * kv heads, head_dim]
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = self.rotary.rotate(qk, rows)
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        if not self.stores_kv:
            batch.store_kv(spec, k, v)
        out = self.backend.run(spec, q, k, v, batch)
        return self.o_proj(out.flatten(1))


class QKNorm(nn.Module):
    """RMS norm over each head, with one weight for queries and one for keys, done for both at once."""

    weight: torch.Tensor  # [q heads + kv heads, head_dim]

    def __init__(self, context: BuildContext, prefix: str, heads: HeadLayout, eps: float) -> None:
        super().__init__()
        self.heads = (heads.num_heads, heads.num_kv_heads)
        self.shape = (heads.head_dim,)
        self.eps = eps
        self.q = ShardedParameter(torch.empty(heads.head_dim, dtype=context.dtype))
        self.k = ShardedParameter(torch.empty(heads.head_dim, dtype=context.dtype))
        self.q.bind(f"{prefix}.q_norm.weight")
        self.k.bind(f"{prefix}.k_norm.weight")

    def finish(self) -> None:
        """Lay the two weights out by heads."""
        weight = torch.cat((self.q.expand(self.heads[0], -1), self.k.expand(self.heads[1], -1)))
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(qk, self.shape, None, self.eps) * self.weight
