"""Norms of queries and keys before the rotary embedding: over each head, or over all heads
together; and the kernel that also rotates them and stores keys and values.

Used by `attention`. Must not know an architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.row_operations import KVCacheTarget, QKVLayout
from frame.models.layers.linear import HeadLayout
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule
from frame.models.layers.weights.layer_weight import set_buffer

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionSpec
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.row_operations import RowOperations
    from frame.models.layers.rotary import Rotary

QKNormKind = Literal["head", "projection", "layer", "rotated"]


class QKNorm(nn.Module):
    """RMSNorm over each head, with one weight for queries and one for keys, computed for both at
    once. `offset` is added to the weights."""

    weight: torch.Tensor  # [q heads + kv heads, head_dim]
    pair: torch.Tensor  # [2, head_dim], for the kernel that also rotates and stores

    def __init__(self, context: BuildContext, prefix: str, heads: HeadLayout, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.heads = (heads.num_heads, heads.num_kv_heads)
        self.shape = (heads.head_dim,)
        self.eps = eps
        self.offset = offset
        self.q = ShardedParameter(torch.empty(heads.head_dim, dtype=context.dtype))
        self.k = ShardedParameter(torch.empty(heads.head_dim, dtype=context.dtype))
        self.q.bind(f"{prefix}.q_norm.weight")
        self.k.bind(f"{prefix}.k_norm.weight")

    def process_weights_after_loading(self) -> None:
        """Expand the two weights to all heads, and stack them for the kernel."""
        q, k = (tensor.data.float() + self.offset if self.offset else tensor.data for tensor in (self.q, self.k))
        weight = torch.cat((q.expand(self.heads[0], -1), k.expand(self.heads[1], -1)))
        set_buffer(self, "weight", weight)
        pair = torch.stack((q, k))
        set_buffer(self, "pair", pair.float() if pair.device.type == "cpu" else pair)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """[tokens, q heads + kv heads, head_dim] -> the same shape."""
        if self.offset:
            return (F.rms_norm(qk.float(), self.shape, None, self.eps) * self.weight).to(qk.dtype)
        return F.rms_norm(qk, self.shape, None, self.eps) * self.weight


class SeparateNorm(nn.Module):
    """Weights for each head, of queries and of keys. kind "projection": RMSNorm over all heads of
    the whole model together. kind "layer": LayerNorm without bias over each head."""

    def __init__(self, context: BuildContext, prefix: str, heads: HeadLayout, eps: float, kind: QKNormKind) -> None:
        super().__init__()
        self.tp = context.tp
        self.eps = eps
        self.kind = kind
        self.spans = (heads.queries, heads.keys)
        self.weight_q = self._parameter(context, f"{prefix}.q_norm.weight", heads.queries, heads.head_dim)
        self.weight_k = self._parameter(context, f"{prefix}.k_norm.weight", heads.keys, heads.head_dim)

    def _parameter(self, context: BuildContext, name: str, span: Range, size: int) -> ShardedParameter:
        """[heads, head_dim] ("layer"), or flat ("projection"), as in the checkpoint."""
        is_flat = self.kind == "projection"
        shape = (span.size * size,) if is_flat else (span.size, size)
        parameter = ShardedParameter(torch.empty(shape, dtype=context.dtype), ShardRule(output=0))
        parameter.bind(name, Range(span.full * size, span.start * size, span.size * size) if is_flat else span)
        return parameter

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """[tokens, q heads + kv heads, head_dim] -> the same shape."""
        q, k = qk.split([span.size for span in self.spans], 1)
        if self.kind == "layer":
            normed = [F.layer_norm(tensor.float(), tensor.shape[-1:], None, None, self.eps) for tensor in (q, k)]
        else:
            normed = self._scale_together(q.float(), k.float())
        weights = [weight.view(-1, qk.shape[-1]) for weight in (self.weight_q, self.weight_k)]
        return torch.cat([tensor * weight for tensor, weight in zip(normed, weights, strict=True)], 1).to(qk.dtype)

    def _scale_together(self, q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        """Both divided by their root mean squares over the heads of all ranks."""
        squares = torch.stack([tensor.square().sum((1, 2)) for tensor in (q, k)], 1)  # [tokens, 2]
        if self.tp.size > 1:
            squares = self.tp.all_reduce(squares)
        roots = []
        for index, (tensor, span) in enumerate(zip((q, k), self.spans, strict=True)):
            counted = self.tp.size * span.size * tensor.shape[-1]  # replicated heads are counted once a rank
            roots.append(torch.rsqrt(squares[:, index] / counted + self.eps)[:, None, None])
        return [q * roots[0], k * roots[1]]


class RotatedNorm(nn.Module):
    """RMSNorm without weights over each head, after the rotary embedding (Llama 4)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> the same shape."""
        return F.rms_norm(qk.float(), qk.shape[-1:], None, self.eps).to(qk.dtype)


class FusedQKVKernel:
    """Query and key norm, rotary embedding and cache store of one layer in one kernel. Keys are
    rotated in place."""

    def __init__(
        self, context: BuildContext, spec: AttentionSpec, rotary: Rotary, heads: QKVLayout, operations: RowOperations | None
    ) -> None:
        """operations: a GEMM kernel's; None: the Triton kernel."""
        if operations is None:
            from frame.kernels.elementwise.rope import norm_rope_store

            self.run = norm_rope_store
        else:
            self.run = operations.norm_rope_store
        capabilities = context.attention.capabilities if context.attention is not None else None
        self.operations = operations
        self.rotary = rotary
        self.heads = heads
        self.stores = capabilities is not None and not capabilities.stores_kv and capabilities.layout == "paged_nhd" and spec.causal
        self.has_fp8 = kernels.supports_fp8(context.device)

    @classmethod
    def build(cls, context: BuildContext, spec: AttentionSpec, rotary: Rotary, gated: bool) -> FusedQKVKernel | None:
        """That of the device; None where there is none for these heads."""
        heads = QKVLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary.dim, rotary.interleaved, gated)
        if rotary.fused:
            return cls(context, spec, rotary, heads, None)
        operations = context.row_operations
        if operations is None or not operations.can_rotate(heads):
            return None
        return cls(context, spec, rotary, heads, operations)

    def _can_store(self, dtype: torch.dtype) -> bool:
        if self.operations is not None:
            return self.operations.can_store(dtype)
        return self.has_fp8 or dtype is not torch.float8_e4m3fn

    def __call__(
        self, spec: AttentionSpec, qkv: torch.Tensor, norm: nn.Module | None, batch: ForwardBatch, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Queries, keys and values in the layout of a backend, and whether keys and values are
        already stored in the cache. rows: those of `Rotary.prepare_rows`."""
        cache = None
        if self.stores:
            k_cache, v_cache = batch.kv.layer(spec.layer)
            if self._can_store(k_cache.dtype):
                scales = batch.kv.scales(spec.layer) if k_cache.dtype is torch.int8 else ()
                cache = KVCacheTarget(batch.kv_slots, k_cache, v_cache, spec.k_scale, spec.v_scale, *scales)
        weights = (norm.pair, norm.eps) if isinstance(norm, QKNorm) else None
        if norm is not None and weights is None:  # a norm that the kernel does not compute
            qk = qkv.unflatten(-1, (-1, spec.head_dim))[:, : spec.num_heads + spec.num_kv_heads]
            qk.copy_(norm(qk))
        q = self.run(qkv, *self.rotary.choose_table(batch, rows), self.heads, weights, cache)
        k, v = qkv.unflatten(-1, (-1, spec.head_dim))[:, -2 * spec.num_kv_heads :].chunk(2, 1)
        return q, k, v, cache is not None


def build_qk_norm(
    context: BuildContext, prefix: str, heads: HeadLayout, eps: float, kind: QKNormKind, offset: float
) -> QKNorm | SeparateNorm | RotatedNorm:
    """The norm of queries and keys of the attention layer `prefix`."""
    if kind == "rotated":
        return RotatedNorm(eps)
    return QKNorm(context, prefix, heads, eps, offset) if kind == "head" else SeparateNorm(context, prefix, heads, eps, kind)
