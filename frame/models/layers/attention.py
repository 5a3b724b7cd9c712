"""Multi-head attention of a decoder layer: projections, optional query and key norms, rotary
embedding, cache store, backend call.

Also the layer facts that attention modules read from checkpoints: KV-cache scales and sliding
windows. Depends on no page and no kernel: it stores through the batch and calls the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels.linear.invariant import map_elements
from frame.models.layers.linear import ColumnLinear, HeadLayout, QKVLinear, RowLinear
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import ShardedParameter, ShardRule
from frame.models.layers.qk_norm import FusedQKVKernel, QKNormKind, RotatedNorm, build_qk_norm
from frame.models.layers.rotary import SPARE_POSITIONS
from frame.models.layers.weights.kv_scales import KVScales

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import ModelConfig
    from frame.models.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What differs between architectures. `qk_norm`: epsilon of a norm of queries and keys; None:
    no norm. `sliding_window`: tokens, including the query's own position; None: full attention."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: float | None = None
    qk_norm_kind: QKNormKind = "head"
    norm_offset: float = 0.0  # added to the weights of the norm
    sliding_window: int | None = None
    scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    soft_cap: float | None = None
    sinks: bool = False  # the checkpoint has one more logit a head, without a value, as `sinks`
    rotates: bool = True  # False: no position embedding in this layer
    chunked: bool = False  # the window is a chunk, see `AttentionSpec`
    temperature: tuple[float, float, int] | None = None  # beta, scale and shift of a `QueryTemperature`
    gated: bool = False  # q_proj also has an output gate, after each head's query
    value_norm: float | None = None  # epsilon of a norm of values, over each head and without weights
    input_size: int | None = None  # of the layer; None: hidden_size


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
        self.stores_kv = context.attention.capabilities.stores_kv or model_config.encoder  # or there is no cache
        self.rotary = rotary if options.rotates else None
        self.temperature = QueryTemperature.read_config(context, model_config)
        if options.temperature is not None:
            self.temperature = QueryTemperature(context, *options.temperature)
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=model_config.head_dim,
            v_head_dim=model_config.head_dim,
            scale=options.scale if options.scale is not None else model_config.head_dim**-0.5,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            chunked=options.chunked,
            causal=not model_config.encoder,
        )
        names = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        self.gated = options.gated
        self.value_norm = options.value_norm
        self.shares_kv = False  # whether another layer reads `step_kv`
        self.step_kv: tuple[torch.Tensor, torch.Tensor] | None = None  # this step's keys and values
        self.qkv_proj = QKVLinear(context, names, options.input_size or model_config.hidden_size, heads, options.qkv_bias, options.gated)
        self.o_proj = RowLinear(
            context, f"{prefix}.o_proj", model_config.num_heads * model_config.head_dim, model_config.hidden_size, options.out_bias
        )
        self.qk_norm: nn.Module | None = None
        if options.qk_norm is not None:
            self.qk_norm = build_qk_norm(context, prefix, heads, options.qk_norm, options.qk_norm_kind, options.norm_offset)
        can_norm = options.qk_norm_kind == "head" if options.gated else options.qk_norm_kind != "rotated"
        self.kernel = FusedQKVKernel.build(context, self.spec, rotary, options.gated) if options.rotates and can_norm else None
        self.kv_scales = KVScales(prefix, heads.keys, context.kv_dtype == torch.float8_e4m3fn)
        self.sinks: ShardedParameter | None = None
        if options.sinks:
            self.sinks = ShardedParameter(torch.empty(heads.num_heads, dtype=torch.float32), ShardRule(output=0))
            self.sinks.bind(f"{prefix}.sinks", heads.queries)

    def process_weights_after_loading(self) -> None:
        """Copy the loaded KV-cache scales and sinks to the spec."""
        self.spec = replace(self.kv_scales.apply_to_spec(self.spec), sinks=None if self.sinks is None else self.sinks.data)
        if self.kv_scales.split_heads(self.spec.num_heads) and self.kernel is not None:
            self.kernel.stores = False

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self.o_proj.defer_sum()

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """`rows`: the batch's rows of the rotary table; None where a kernel reads the table by
        position."""
        batch = batch.view(self.spec.layer)
        qkv, gate = self.qkv_proj(x), None
        if self.gated:
            gate = qkv.unflatten(-1, (-1, self.spec.head_dim))[:, 1 : 2 * self.spec.num_heads : 2]
        if self.value_norm is not None:
            values = qkv[:, -self.spec.num_kv_heads * self.spec.v_head_dim :].unflatten(-1, (-1, self.spec.v_head_dim))
            values.copy_(F.rms_norm(values.float(), values.shape[-1:], None, self.value_norm))
        if self.kernel is not None and not torch.compiler.is_compiling():
            q, k, v, is_stored = self.kernel(self.spec, qkv, self.qk_norm, batch, rows)
        elif rows is not None or self.rotary is None:
            q, k, v = self._rotated(qkv, rows)
            is_stored = False
        else:
            q, k, v = self._rotated(qkv, self.rotary.gather_rows(batch.positions))
            is_stored = False
        if self.temperature is not None:
            q = self.temperature.scale_queries(q, batch.positions)
        if self.kv_scales.by_head:
            k, v = self.kv_scales.divide_keys(k, v)
        if not (is_stored or self.stores_kv):
            batch.store_kv(self.spec, k, v)
        if self.shares_kv:
            self.step_kv = k, v
        out = self.attend(q, k, v, batch)
        return self.o_proj(out if gate is None else apply_gate(out, gate, invariant=self.backend.context.deterministic))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The backend's result for keys and values as they are stored, [tokens, heads *
        head_dim]."""
        if not self.kv_scales.by_head:
            return self.backend.run(self.spec, q, k, v, batch).flatten(1)
        out = self.backend.run(self.spec, self.kv_scales.multiply_queries(q), k, v, batch)
        return self.kv_scales.multiply_results(out).flatten(1)

    def _rotated(self, qkv: torch.Tensor, rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        rotated = spec.num_heads + spec.num_kv_heads
        qkv = qkv.unflatten(-1, (-1, spec.head_dim))  # [tokens, q heads + 2 * kv heads, head_dim]
        if self.gated:  # a gate follows each query
            qkv = torch.cat((qkv[:, : 2 * spec.num_heads : 2], qkv[:, 2 * spec.num_heads :]), 1)
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        norms_last = isinstance(self.qk_norm, RotatedNorm)
        if self.qk_norm is not None and not norms_last:
            qk = self.qk_norm(qk)
        if self.rotary is not None and rows is not None:
            qk = self.rotary.rotate(qk, rows)
        if self.qk_norm is not None and norms_last:
            qk = self.qk_norm(qk)
        return qk[:, : spec.num_heads], qk[:, spec.num_heads :], v


class SharedKVAttention(nn.Module):
    """Attention over the keys and values of an earlier layer, `source`, of equal sizes and window.
    It has queries of its own, with a norm over each head."""

    def __init__(
        self, context: BuildContext, model_config: ModelConfig, prefix: str, rotary: Rotary, source: Attention, eps: float
    ) -> None:
        super().__init__()
        source.shares_kv = True
        self.sources = (source,)  # a tuple, so that torch does not register it a second time
        self.rotary = rotary
        self.heads = (source.spec.num_heads, source.spec.head_dim)
        width, hidden, bias = model_config.num_heads * model_config.head_dim, model_config.hidden_size, source.o_proj.bias is not None
        self.q_proj = ColumnLinear(context, (f"{prefix}.q_proj",), hidden, (width,), bias)
        self.q_norm = RMSNorm(context, f"{prefix}.q_norm", model_config.head_dim, eps)
        self.o_proj = RowLinear(context, f"{prefix}.o_proj", width, hidden, bias)

    @property
    def spec(self) -> AttentionSpec:
        """That of the layer whose cache it reads."""
        return self.sources[0].spec

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """As `Attention.forward`."""
        (source,) = self.sources
        if source.step_kv is None:
            raise TypeError("the layer that stores the keys must run first")
        batch = batch.view(source.spec.layer)
        q = self.q_norm(self.q_proj(x).view(-1, self.heads[1])).view(-1, *self.heads)
        q = self.rotary.rotate(q, self.rotary.gather_rows(batch.positions) if rows is None else rows)
        return self.o_proj(source.attend(q, *source.step_kv, batch))


def apply_gate(x: torch.Tensor, gate: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
    """x * sigmoid(gate), x [tokens, heads * head_dim] and gate [tokens, heads, head_dim].
    invariant: see `map_elements`."""
    if kernels.can_use_triton(x.device) and not torch.compiler.is_compiling():
        from frame.kernels.elementwise.activation import sigmoid_mul

        return sigmoid_mul(x, gate)
    gate = gate.flatten(1)
    return x * (map_elements(torch.sigmoid, gate) if invariant else torch.sigmoid(gate))


class QueryTemperature(nn.Module):
    """Factors of the queries by position: 1 + beta * log(1 + floor((position + shift) / scale))
    (Llama 4, Ministral 3)."""

    factors: torch.Tensor  # [positions, 1, 1]

    def __init__(self, context: BuildContext, beta: float, scale: float, shift: int = 0) -> None:
        super().__init__()
        self.rule = (beta, scale, shift)
        self.length = context.limits.max_context + SPARE_POSITIONS
        self.device = context.device
        self.register_buffer("factors", torch.empty(self.length, 1, 1, device="meta"), persistent=False)

    @classmethod
    def read_config(cls, context: BuildContext, model_config: ModelConfig) -> QueryTemperature | None:
        """That of Ministral 3, whose rotary settings have `llama_4_scaling_beta`; else None."""
        rope = model_config.config.get("rope_parameters") or model_config.config.get("rope_scaling") or {}
        beta = rope.get("llama_4_scaling_beta")
        return cls(context, float(beta), float(rope["original_max_position_embeddings"])) if beta else None

    def process_weights_after_loading(self) -> None:
        """Compute the factors of all positions. They depend on no weight: a second call does
        nothing."""
        if not self.factors.is_meta:
            return
        beta, scale, shift = self.rule
        positions = torch.arange(self.length, dtype=torch.float32)
        factors = 1 + beta * torch.log(1 + torch.floor((positions + shift) / scale))
        self.register_buffer("factors", factors[:, None, None].to(self.device), persistent=False)

    def scale_queries(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim] -> the same shape."""
        return q * self.factors.index_select(0, positions).to(q.dtype)


def get_layer_window(config: Mapping[str, Any], layer: int) -> int | None:
    """The sliding window of a Qwen layer in tokens, including the query's own position; None for
    full attention."""
    if not config.get("use_sliding_window", False) or not config.get("sliding_window"):
        return None
    kinds = config.get("layer_types")
    slides = kinds[layer] == "sliding_attention" if kinds else layer >= config.get("max_window_layers", 28)
    return int(config["sliding_window"]) if slides else None


def find_layer_window(model_config: ModelConfig, layer: int, pattern: int | None = None) -> int | None:
    """The sliding window of a layer by `layer_types`; None for full attention. Without that list
    every `pattern`-th layer has full attention, or no layer if `pattern` is None."""
    config = model_config.config
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window:
        return None
    slides = kinds[layer] == "sliding_attention" if kinds else pattern is None or bool((layer + 1) % pattern)
    return int(window) if slides else None
