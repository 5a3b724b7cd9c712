"""Multi-head attention of a decoder layer: projections, optional query and key norms, rotary
embedding, cache store, backend call.

Also the layer facts that attention modules read from checkpoints: KV-cache scales and sliding
windows. Depends on no page and no kernel: it stores through the batch and calls the backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.errors import CheckpointError
from frame.core.interfaces.attention import AttentionSpec
from frame.models.layers.linear import HeadLayout, QKVLinear, RowLinear
from frame.models.layers.parameter import ShardedParameter, ShardRule

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import ModelConfig
    from frame.models.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What differs between architectures. `qk_norm`: epsilon of an RMSNorm over each head's queries
    and keys; None: no norm. `sliding_window`: tokens, including the query's own position; None:
    full attention."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: float | None = None
    sliding_window: int | None = None
    scale: float | None = None  # factor of the scores; None: head_dim ** -0.5


class Attention(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. `prefix` is the checkpoint name that holds q_proj,
    k_proj, v_proj, o_proj (and q_norm, k_norm)."""

    def __init__(
        self, context: BuildContext, model_config: ModelConfig, layer: int, prefix: str, rotary: Rotary, options: AttentionOptions
    ) -> None:
        super().__init__()
        if context.attention is None:
            raise TypeError("the build context of a model needs an attention backend")
        heads = HeadLayout(context, model_config.num_heads, model_config.num_kv_heads, model_config.head_dim)
        self.backend = context.attention
        self.stores_kv = context.attention.capabilities.stores_kv
        self.rotary = rotary
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=model_config.head_dim,
            v_head_dim=model_config.head_dim,
            scale=options.scale if options.scale is not None else model_config.head_dim**-0.5,
            sliding_window=options.sliding_window,
        )
        names = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv_proj = QKVLinear(context, names, model_config.hidden_size, heads, options.qkv_bias)
        self.o_proj = RowLinear(
            context, f"{prefix}.o_proj", model_config.num_heads * model_config.head_dim, model_config.hidden_size, options.out_bias
        )
        self.qk_norm = QKNorm(context, prefix, heads, options.qk_norm) if options.qk_norm is not None else None
        self.kernel = FusedQKVKernel(context, self.spec, rotary) if rotary.fused else None
        self.kv_scales = KVScales(prefix)

    def finish(self) -> None:
        """Copy the loaded KV-cache scales to the spec."""
        self.spec = self.kv_scales.apply_to_spec(self.spec)

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """`rows`: the batch's rows of the rotary table; None where a kernel reads the table by
        position."""
        qkv = self.qkv_proj(x)
        if rows is not None:
            q, k, v = self._rotated(qkv, rows)
            is_stored = False
        elif self.kernel is not None:
            q, k, v, is_stored = self.kernel(self.spec, qkv, self.qk_norm, batch)
        else:
            raise TypeError("rows of the rotary table may be None only if the layer has a fused kernel")
        if not (is_stored or self.stores_kv):
            batch.store_kv(self.spec, k, v)
        out = self.backend.run(self.spec, q, k, v, batch)
        return self.o_proj(out.flatten(1))

    def _rotated(self, qkv: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        rotated = spec.num_heads + spec.num_kv_heads
        qkv = qkv.unflatten(-1, (-1, spec.head_dim))  # [tokens, q heads + 2 * kv heads, head_dim]
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = self.rotary.rotate(qk, rows)
        return qk[:, : spec.num_heads], qk[:, spec.num_heads :], v


class FusedQKVKernel:
    """Query and key norm, rotary embedding and cache store of one layer in one kernel. Keys are
    rotated in place."""

    def __init__(self, context: BuildContext, spec: AttentionSpec, rotary: Rotary) -> None:
        from frame.kernels.elementwise.rope import KVCacheTarget, QKVLayout, norm_rope_store

        capabilities = context.attention.capabilities if context.attention is not None else None
        self.run = norm_rope_store
        self.cache = KVCacheTarget
        self.rotary = rotary
        self.heads = QKVLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary.dim, rotary.interleaved)
        self.stores = capabilities is not None and not capabilities.stores_kv and capabilities.layout == "paged_nhd"
        self.has_fp8 = kernels.supports_fp8(context.device)

    def __call__(
        self, spec: AttentionSpec, qkv: torch.Tensor, norm: QKNorm | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Queries, keys and values in the layout of a backend, and whether keys and values are
        already stored in the cache."""
        cache = None
        if self.stores:
            k_cache, v_cache = batch.kv.layer(spec.layer)
            if self.has_fp8 or k_cache.dtype is not torch.float8_e4m3fn:
                cache = self.cache(batch.kv_slots, k_cache, v_cache, spec.k_scale, spec.v_scale)
        weights = (norm.pair, norm.eps) if norm is not None else None
        q = self.run(qkv, batch.positions, self.rotary.table, self.heads, weights, cache)
        _, k, v = qkv.unflatten(-1, (-1, spec.head_dim)).split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
        return q, k, v, cache is not None


class QKNorm(nn.Module):
    """RMSNorm over each head, with one weight for queries and one for keys, computed for both at
    once."""

    weight: torch.Tensor  # [q heads + kv heads, head_dim]
    pair: torch.Tensor  # [2, head_dim]

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
        """Expand the two weights to all heads, and stack them for the kernel."""
        weight = torch.cat((self.q.expand(self.heads[0], -1), self.k.expand(self.heads[1], -1)))
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("pair", torch.stack((self.q, self.k)), persistent=False)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(qk, self.shape, None, self.eps) * self.weight


class KVScales(nn.Module):
    """`k_scale` and `v_scale` of an fp8 KV cache: one number each, under the attention layer
    `prefix` or its projections; 1.0 if the checkpoint has none."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.k_scale = ShardedParameter(torch.empty(()), ShardRule(scalar=True), optional=True)
        self.v_scale = ShardedParameter(torch.empty(()), ShardRule(scalar=True), optional=True)
        for kind, parameter in (("k", self.k_scale), ("v", self.v_scale)):
            for place in ("", f"{kind}_proj.", "attn."):
                parameter.bind(f"{prefix}.{place}{kind}_scale")

    def apply_to_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec with the loaded scales. Raises CheckpointError if one is not a positive
        number."""
        return replace(spec, k_scale=self._value(self.k_scale), v_scale=self._value(self.v_scale))

    def _value(self, parameter: ShardedParameter) -> float:
        value = float(parameter) if parameter.loaded else 1.0
        if not (math.isfinite(value) and value > 0):
            names = " or ".join(sorted(parameter.loaded))
            raise CheckpointError(f"{names} is {value}; a scale of the KV cache must be a positive number. Check the checkpoint.")
        return value


def get_layer_window(config: Mapping[str, Any], layer: int) -> int | None:
    """The sliding window of a Qwen layer in tokens, including the query's own position; None for
    full attention."""
    if not config.get("use_sliding_window", False) or not config.get("sliding_window"):
        return None
    kinds = config.get("layer_types")
    slides = kinds[layer] == "sliding_attention" if kinds else layer >= config.get("max_window_layers", 28)
    return int(config["sliding_window"]) if slides else None
