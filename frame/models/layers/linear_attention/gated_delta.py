"""Gated DeltaNet (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5.

A layer stores one state a sequence: the past inputs of its convolution, and the matrix of each
head. Heads are split over the tensor-parallel ranks. Must not know a page or a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame.kernels.linear_attention import MixLayout
from frame.models.layers.linear import ColumnLinear, RowLinear, scale_range, split_range
from frame.models.layers.linear_attention.convolution import ShortConvolution, StepPositions
from frame.models.layers.linear_attention.gated_norm import GatedNorm
from frame.models.layers.linear_attention.mixer import StateMixer
from frame.models.layers.mlp import require_silu
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The sizes of a layer in the whole model. `grouped`: the checkpoint stores the projections by
    key head (Qwen3-Next), not one after another (Qwen3.5)."""

    hidden: int
    key_heads: int
    value_heads: int
    key: int  # of a head
    value: int
    width: int  # of the convolution
    eps: float
    grouped: bool

    @classmethod
    def read_config(cls, config: Mapping[str, Any], grouped: bool) -> DeltaSizes:
        """The sizes that config.json names. Raises ConfigurationError for another activation than
        SiLU."""
        require_silu(config, "recurrent layers")
        return cls(
            config["hidden_size"],
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            config.get("linear_conv_kernel_dim", 4),
            config.get("rms_norm_eps", 1e-6),
            grouped,
        )

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """The checkpoint's layers that hold queries, keys and values of all heads, for
        `split_layers`."""
        queries, values = self.key_heads * self.key, self.value_heads * self.value
        streams = {"q": queries, "k": queries, "v": values}
        names = ("conv1d",) if self.grouped else ("conv1d", "in_proj_qkv")
        return {name: {f"{name.removesuffix('_qkv')}_{stream}": size for stream, size in streams.items()} for name in names}


class GatedDeltaNet(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. `prefix` is the checkpoint name that holds the
    projections, conv1d, A_log, dt_bias, norm and out_proj."""

    def __init__(self, context: BuildContext, layer: int, prefix: str, sizes: DeltaSizes, positions: StepPositions) -> None:
        super().__init__()
        self.sizes = sizes
        keys = split_range(context, "linear key heads", sizes.key_heads)
        heads = split_range(context, "linear value heads", sizes.value_heads)
        self.heads = (keys.size, heads.size)
        self.projections = _build_projections(context, prefix, sizes)
        spans = [scale_range(span, size) for span, size in ((keys, sizes.key), (keys, sizes.key), (heads, sizes.value))]
        names = [f"{prefix}.conv1d_{stream}" for stream in "qkv"]
        conv = ShortConvolution(context, dict(zip(names, spans, strict=True)), sizes.width)
        places = (0, keys.size * sizes.key, 2 * keys.size * sizes.key)
        layout = MixLayout(heads.size, keys.size, sizes.key, sizes.value, places)
        self.mixer = StateMixer(context, layer, layout, conv, positions)
        self.mixer.log_decay, self.mixer.bias = (build_by_head(f"{prefix}.{name}", heads) for name in ("A_log", "dt_bias"))
        self.norm = GatedNorm(context, f"{prefix}.norm", Range.whole(sizes.value), sizes.value, sizes.eps)
        self.out_proj = RowLinear(context, f"{prefix}.out_proj", sizes.value_heads * sizes.value, sizes.hidden)

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self.out_proj.defer_sum()

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """`rows` is unused: the order of tokens is in the state."""
        mixed, gate, b, a = self._project(x)
        return self.out_proj(self.norm(self.mixer(mixed, a, b, batch).flatten(1), gate))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(queries, keys and values; gate; beta; decay) before their activations."""
        sizes, (key_heads, heads) = self.sizes, self.heads
        large, small = self.projections
        second = small(x)  # before the large GEMM, which loads weights while this one waits for x and runs
        first = large(x)
        if not sizes.grouped:
            values = heads * sizes.value
            mixed, gate = first.split((2 * key_heads * sizes.key + values, values), -1)
            b, a = second.chunk(2, -1)
            return mixed, gate, b, a
        values = heads // key_heads * sizes.value
        streams = first.unflatten(-1, (key_heads, -1)).split((sizes.key, sizes.key, values, values), -1)
        q, k, v, gate = (stream.flatten(1) for stream in streams)
        b, a = (stream.flatten(1) for stream in second.unflatten(-1, (key_heads, -1)).chunk(2, -1))
        return torch.cat((q, k, v), -1), gate, b, a


def _build_projections(context: BuildContext, prefix: str, sizes: DeltaSizes) -> nn.ModuleList:
    """(queries, keys, values and gate; beta and decay), each as one GEMM."""
    keys, values = sizes.key_heads * sizes.key, sizes.value_heads * sizes.value
    if sizes.grouped:
        streams = [({"in_proj_qkvz": 2 * keys + 2 * values}), ({"in_proj_ba": 2 * sizes.value_heads})]
    else:
        streams = [
            {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values},
            {"in_proj_b": sizes.value_heads, "in_proj_a": sizes.value_heads},
        ]
    return nn.ModuleList(
        ColumnLinear(context, [f"{prefix}.{name}" for name in stream], sizes.hidden, list(stream.values())) for stream in streams
    )


def build_by_head(name: str, heads: Range) -> ShardedParameter:
    """A float32 parameter of one entry a head."""
    parameter = ShardedParameter(torch.empty(heads.size, dtype=torch.float32), ShardRule(output=0))
    parameter.bind(name, heads)
    return parameter
