"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): projections to and from the latent,
in the absorbed and the expanded form.

The cache holds one row per token: the normed latent and the rotated shared key. The backend selects
the form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import SparseKeys
from frame.kernels.linear.invariant import InvariantRows, Multiply
from frame.models.layers.linear import ColumnLinear, ReplicatedLinear, RowLinear, scale_range, split_range
from frame.models.layers.norm import RMSNorm
from frame.models.layers.packed import can_pack, pack_weight, packed_linear
from frame.models.layers.parameter import Range
from frame.models.layers.weights.kv_scales import KVScales
from frame.models.layers.weights.layer_weight import set_buffer

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import LatentDelta
    from frame.core.interfaces.attention import LatentProjections
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import ModelConfig
    from frame.models.layers.rotary import Rotary

_NORM_EPS = 1e-6  # epsilon of the two inner norms, independent of the model's own
# bytes of a folded weight at most: up to this, reading more weights costs less than one more
# GEMM
_FOLDED_BYTES = 1 << 20
_FOLDED_TOKENS = 4  # a row and step on average, for which folded weights save more than their GEMMs cost


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of one latent-attention layer. `q_lora_rank` None: queries are projected from the
    hidden state directly."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    value: int

    @classmethod
    def from_model_config(cls, model_config: ModelConfig) -> LatentSizes:
        config = model_config.config
        return cls(
            config.get("q_lora_rank"), config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        )


class LatentAttention(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. Implements `LatentProjections`, which backends use.

    `scale` is the whole factor of the scores. Heads are split over the tensor-parallel ranks; the
    latent is whole on each.
    """

    def __init__(self, context: BuildContext, model_config: ModelConfig, layer: int, prefix: str, rotary: Rotary, scale: float) -> None:
        super().__init__()
        if context.attention is None:
            raise TypeError("the build context of a model needs an attention backend")
        sizes = LatentSizes.from_model_config(model_config)
        head_range = split_range(context, "attention heads", model_config.num_heads)
        heads = head_range.size
        self.kv_lora_rank = sizes.kv_lora_rank
        self.qk_nope_head_dim = sizes.nope
        self.qk_rope_head_dim = sizes.rope
        self.hidden_size = model_config.hidden_size
        self.rotary = rotary
        self.backend = context.attention
        self.spec = AttentionSpec(layer, heads, 1, sizes.nope + sizes.rope, sizes.value, scale)
        self.projections = LatentInputs(context, model_config, prefix, sizes, bool(model_config.config.get("attention_bias", False)))
        self.kv_b_proj = LatentExpansion(context, head_range, prefix, sizes)
        out_bias = bool(model_config.config.get("attention_bias", False))
        self.o_proj = RowLinear(context, f"{prefix}.o_proj", model_config.num_heads * sizes.value, model_config.hidden_size, out_bias)
        self.kv_scales = KVScales(prefix, Range.whole(1))
        self.may_fold = context.tp.size == 1 and not out_bias and not context.deterministic
        self.folded: FoldedProjections | None = None
        self.kernel = FusedLatentKernel(context, rotary) if rotary.fused else None
        # (x, input of the query projection, batch) -> the keys to attend to; None: all
        self.select_keys: Callable[[torch.Tensor, torch.Tensor, ForwardBatch], SparseKeys | None] | None = None

    def process_weights_after_loading(self) -> None:
        """Copy the loaded KV-cache scale to the spec, and fold small weights for decoding."""
        self.spec = self.kv_scales.apply_to_spec(self.spec)
        self.folded = fold_projections(self) if self.may_fold else None

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self.o_proj.defer_sum()

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """`rows`: the batch's rows of the rotary table; None where kernels read the table by
        position."""
        folded = self.folded if batch.num_tokens <= _FOLDED_TOKENS * batch.num_rows else None
        if folded is not None and (self.projections.q_proj.is_adapted or self.o_proj.is_adapted):
            folded = None
        layer: LatentProjections = self if folded is None else folded
        is_stored = False
        if rows is not None:
            q_input, latent, k_rope = self.projections(x)  # [tokens, q_rank], [tokens, rank], [tokens, rope]
        elif self.kernel is not None:
            q_input, row, is_stored = self.kernel.prepare_inputs(self.spec, self.projections, x, batch)
        else:
            raise TypeError("rows of the rotary table may be None only if the layer has a fused kernel")
        chosen = None if self.select_keys is None else self.select_keys(x, q_input, batch)
        if chosen is not None:
            batch = replace(batch, extensions={**batch.extensions, SparseKeys: chosen})
        q = self.projections.q_proj(q_input) if folded is None else packed_linear(q_input, folded.q, None)
        q_nope, q_rope = q.unflatten(-1, (self.spec.num_heads, -1)).split((layer.qk_nope_head_dim, layer.qk_rope_head_dim), -1)
        if rows is not None:
            # rotate queries and the shared key together: fewer operations
            turned = self.rotary.rotate(torch.cat((q_rope, k_rope.unsqueeze(1)), 1), rows)
            q_rope, row = turned[:, :-1], torch.cat((latent, turned[:, -1]), -1)
        elif self.kernel is not None:
            self.kernel.rotate_(q_rope, batch)
        if not (is_stored or self.backend.capabilities.stores_kv):
            batch.store_kv(self.spec, row)
        delta = self.kv_b_proj.delta
        if delta is not None and delta.is_active:
            out = self._attend_adapted(delta, q_nope, q_rope, row, batch).flatten(1)
        else:
            out = self.backend.run_mla(layer, q_nope, q_rope, row, batch).flatten(1)
        return self.o_proj(out) if folded is None else packed_linear(out, folded.out, None)

    def _attend_adapted(
        self, delta: LatentDelta, q_nope: torch.Tensor, q_rope: torch.Tensor, row: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """`AttentionBackend.run_mla` with the deltas of `kv_b_proj`, outside of the backend."""
        attended = self.backend.run_mla(LatentHeads.of(self), delta.absorb(q_nope, self.absorb), q_rope, row, batch)
        out = delta.unabsorb(attended, self.unabsorb)
        if out.device.type != "cpu" or (is_adapted := delta.adapted_rows).all():
            return out
        # without an adapter the backend selects the form; on a CPU such rows keep their bits
        return torch.where(is_adapted[:, None, None], out, self.backend.run_mla(self, q_nope, q_rope, row, batch))

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        return self.kv_b_proj.absorb(q_nope)

    def unabsorb(self, out: torch.Tensor) -> torch.Tensor:
        return self.kv_b_proj.unabsorb(out)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_b_proj.expand(latent)


@dataclass(slots=True)
class LatentHeads:
    """A latent layer whose queries come absorbed and whose results stay latent, so that a backend
    projects nothing: to it, this is a layer whose heads are as wide as the latent."""

    spec: AttentionSpec
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int

    @classmethod
    def of(cls, layer: LatentAttention) -> LatentHeads:
        """The heads of a layer whose spec is complete."""
        rank, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
        return cls(replace(layer.spec, head_dim=rank + rope, v_head_dim=rank), rank, rank, rope)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        return q_nope

    def unabsorb(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        same = latent.unsqueeze(1).expand(-1, self.spec.num_heads, -1)
        return same, same


@dataclass(slots=True)
class FoldedProjections(LatentHeads):
    """For decode steps: `kv_b_proj` is multiplied into the neighbouring projections."""

    q: torch.Tensor  # packed [heads * (rank + rope), inputs of the queries]
    out: torch.Tensor  # packed [hidden, heads * rank]


def fold_projections(layer: LatentAttention) -> FoldedProjections | None:
    """The folded weights; None if folding would cost more than it saves: on devices without packed
    weights, or if the weights are too large."""
    spec, rank, rope = layer.spec, layer.kv_lora_rank, layer.qk_rope_head_dim
    w_uk, w_uv = layer.kv_b_proj.w_uk, layer.kv_b_proj.w_uv
    q_inputs = layer.projections.q_inputs
    num_queries, num_values = spec.num_heads * (rank + rope) * q_inputs, spec.num_heads * rank * layer.hidden_size
    if max(num_queries, num_values) * w_uk.element_size() > _FOLDED_BYTES or not can_pack(w_uk[0]):
        return None
    q = _dense(layer.projections.q_proj, q_inputs, w_uk).unflatten(0, (spec.num_heads, -1))  # [heads, nope + rope, inputs]
    q_nope, q_rope = q.split((layer.qk_nope_head_dim, rope), 1)
    q = torch.cat((w_uk.float().transpose(1, 2) @ q_nope, q_rope), 1)
    out = _dense(layer.o_proj, spec.num_heads * spec.v_head_dim, w_uk).unflatten(1, (spec.num_heads, -1))  # [hidden, heads, value]
    out = torch.einsum("dhv,hvr->dhr", out, w_uv.float())
    return FoldedProjections(
        LatentHeads.of(layer).spec, rank, rank, rope,
        pack_weight(q.flatten(0, 1).to(w_uk.dtype)), pack_weight(out.flatten(1).to(w_uk.dtype)),
    )  # fmt: skip


def _dense(linear: nn.Module, inputs: int, like: torch.Tensor) -> torch.Tensor:
    """A linear layer's weight in float32 [outputs, inputs], read off its GEMM."""
    weight: torch.Tensor = linear(torch.eye(inputs, dtype=like.dtype, device=like.device))
    return weight.t().float()


class FusedLatentKernel:
    """The norms, rotations and cache store of one latent layer: one kernel before the query
    projection and one after it."""

    def __init__(self, context: BuildContext, rotary: Rotary) -> None:
        from frame.kernels.elementwise.rope import latent_norm_rope_store, rotate_

        capabilities = context.attention.capabilities if context.attention is not None else None
        self.run = latent_norm_rope_store
        self.turn = rotate_
        self.rotary = rotary
        self.stores = capabilities is not None and not capabilities.stores_kv
        self.has_fp8 = kernels.supports_fp8(context.device)

    def prepare_inputs(
        self, spec: AttentionSpec, projections: LatentInputs, x: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The input of the query projection, the row of the cache, and whether that row is already
        stored."""
        a = projections.a_proj(x)
        cache = scales = None
        if self.stores:
            (rows,) = batch.kv.layer(spec.layer)
            if self.has_fp8 or rows.dtype is not torch.float8_e4m3fn:
                cache = (batch.kv_slots, rows, spec.k_scale)
                scales = batch.kv.scales(spec.layer)[0] if rows.dtype is torch.int8 else None
        q_norm, norm = projections.q_a_layernorm, projections.kv_a_layernorm
        weights = (None if q_norm is None else q_norm.weight.data, norm.weight.data, norm.eps)
        q_input = self.run(a, batch.positions, self.rotary.table, self.rotary.interleaved, weights, cache, scales)
        return x if q_input is None else q_input, a[:, a.shape[1] - sum(projections.splits[-2:]) :], cache is not None

    def rotate_(self, q: torch.Tensor, batch: ForwardBatch) -> None:
        """Rotate the queries' rotary part in place."""
        self.turn(q, batch.positions, self.rotary.table, self.rotary.interleaved)


class LatentInputs(nn.Module):
    """x -> (input of `q_proj`, normed latent, shared key before rotation). The projections that are
    not split over the ranks are one GEMM."""

    def __init__(self, context: BuildContext, model_config: ModelConfig, prefix: str, sizes: LatentSizes, bias: bool) -> None:
        super().__init__()
        latent = sizes.kv_lora_rank + sizes.rope
        q_size = model_config.num_heads * (sizes.nope + sizes.rope)
        self.q_inputs = sizes.q_lora_rank or model_config.hidden_size
        self.splits: tuple[int, ...] = (sizes.kv_lora_rank, sizes.rope)
        self.kv_a_layernorm = RMSNorm(context, f"{prefix}.kv_a_layernorm", sizes.kv_lora_rank, _NORM_EPS)
        kv_a = f"{prefix}.kv_a_proj_with_mqa"
        if sizes.q_lora_rank is None:
            self.q_a_layernorm = None
            self.q_proj = ColumnLinear(context, (f"{prefix}.q_proj",), model_config.hidden_size, (q_size,))
            self.a_proj = ReplicatedLinear(context, (kv_a,), model_config.hidden_size, (latent,), bias)
        else:
            self.splits = (sizes.q_lora_rank, *self.splits)
            self.q_a_layernorm = RMSNorm(context, f"{prefix}.q_a_layernorm", sizes.q_lora_rank, _NORM_EPS)
            self.q_proj = ColumnLinear(context, (f"{prefix}.q_b_proj",), sizes.q_lora_rank, (q_size,))
            names = (f"{prefix}.q_a_proj", kv_a)
            self.a_proj = ReplicatedLinear(context, names, model_config.hidden_size, (sizes.q_lora_rank, latent), bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        *q_a, latent, k_rope = self.a_proj(x).split(self.splits, -1)
        q_input = self.q_a_layernorm(q_a[0]) if self.q_a_layernorm is not None else x
        return q_input, self.kv_a_layernorm(latent), k_rope


class LatentExpansion(nn.Module):
    """`kv_b_proj` by heads, for either form: keys [heads, nope, rank] and values [heads, value,
    rank].

    `process_weights_after_loading` dequantizes the weight by multiplying the identity, because
    absorption multiplies it from the other side.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def __init__(self, context: BuildContext, heads: Range, prefix: str, sizes: LatentSizes) -> None:
        super().__init__()
        name, width = f"{prefix}.kv_b_proj", sizes.nope + sizes.value
        self.heads = heads.size
        self.sizes = sizes
        self.dtype = context.dtype
        self.stored = ColumnLinear(replace(context, adapters=None), (name,), sizes.kv_lora_rank, (heads.full * width,))
        self._is_deterministic = context.deterministic
        self._absorb: Multiply = lambda q_nope: multiply_heads(q_nope, self.w_uk)
        self._unabsorb: Multiply = lambda out: multiply_heads(out, self.w_uv.transpose(1, 2))
        self.delta: LatentDelta | None = None
        if context.adapters is not None and context.attention is not None and context.attention.capabilities.latent_heads:
            ranges = Range.whole(sizes.kv_lora_rank), scale_range(heads, width)
            self.delta = context.adapters.add_latent_layer(name, *ranges, (Range.whole(sizes.nope), Range.whole(sizes.value)))
            self.delta.gemm = lambda latent: torch.cat(self.expand(latent), -1).flatten(1)

    def count_growth(self) -> int:
        """The bytes by which the two weights exceed the GEMM of the stored one, on the meta
        device."""
        sizes, weights = self.sizes, self.stored.weights
        dense = self.heads * (sizes.nope + sizes.value) * sizes.kv_lora_rank * self.dtype.itemsize
        return dense - weights.num_bytes - weights.count_growth()

    def process_weights_after_loading(self) -> None:
        """Derive the two weights and free the stored one. Does nothing if nothing was loaded
        since."""
        if self.stored.gemm is None:  # freed, and nothing was loaded since
            return
        device = next(self.stored.parameters()).device
        identity = torch.eye(self.sizes.kv_lora_rank, dtype=self.dtype, device=device)
        dense = self.stored(identity).t().unflatten(0, (self.heads, -1))
        w_uk, w_uv = dense.split((self.sizes.nope, self.sizes.value), 1)
        set_buffer(self, "w_uk", w_uk.contiguous())
        set_buffer(self, "w_uv", w_uv.contiguous())
        self.stored.release()
        if self._is_deterministic and not isinstance(self._absorb, InvariantRows):
            self._absorb = InvariantRows(self._absorb, w_uk[None, :, :, 0], "absorb", *w_uk.shape)
            self._unabsorb = InvariantRows(self._unabsorb, w_uv[None, :, 0], "unabsorb", *w_uv.shape)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, nope] -> [tokens, heads, rank]."""
        return self._absorb(q_nope)

    def unabsorb(self, out: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, rank] -> [tokens, heads, value]."""
        return self._unabsorb(out)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, rank] -> keys [n, heads, nope] and values [n, heads, value]."""
        keys = F.linear(latent, self.w_uk.flatten(0, 1)).unflatten(-1, (self.heads, -1))
        return keys, F.linear(latent, self.w_uv.flatten(0, 1)).unflatten(-1, (self.heads, -1))


def multiply_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, inputs] by [heads, inputs, outputs] -> contiguous [tokens, heads, outputs].

    The strides depend on no number of tokens, for kernels are compiled for strides.
    """
    out = x.new_empty(*x.shape[:2], weights.shape[2])
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out
