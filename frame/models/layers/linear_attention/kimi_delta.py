"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a decay of each key entry.

A layer stores one state a sequence: the past inputs of its convolutions, and the matrix of each
head. Heads are split over the tensor-parallel ranks. Must not know a page or a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame.core.interfaces.batch import ForwardBatch
from frame.kernels.linear_attention import MixLayout
from frame.models.layers.linear import ColumnLinear, ReplicatedLinear, RowLinear, scale_range, split_range
from frame.models.layers.linear_attention.convolution import ShortConvolution, StepPositions
from frame.models.layers.linear_attention.gated_delta import build_by_head
from frame.models.layers.linear_attention.gated_norm import GatedNorm
from frame.models.layers.linear_attention.mixer import StateMixer
from frame.models.layers.mlp import require_silu
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from frame.core.interfaces.build import BuildContext


class KimiDeltaAttention(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. `prefix` is the checkpoint name that holds the
    projections, the convolutions, A_log, dt_bias, o_norm and o_proj; `config` that of Kimi
    Linear."""

    def __init__(self, context: BuildContext, layer: int, prefix: str, config: Mapping[str, Any], positions: StepPositions) -> None:
        super().__init__()
        heads, self.size, width = read_sizes(config)
        hidden, inner = config["hidden_size"], heads * self.size
        span = split_range(context, "linear heads", heads)
        self.heads, entries = span.size, scale_range(span, self.size)
        names = [f"{prefix}.{name}_proj" for name in "qkvb"]
        self.projections = ColumnLinear(context, names, hidden, (inner, inner, inner, heads))
        self.low = ReplicatedLinear(context, [f"{prefix}.f_a_proj", f"{prefix}.g_a_proj"], hidden, (self.size, self.size))
        self.decay_proj = ColumnLinear(context, [f"{prefix}.f_b_proj"], self.size, (inner,))
        self.gate_proj = ColumnLinear(context, [f"{prefix}.g_b_proj"], self.size, (inner,))
        conv = ShortConvolution(context, {f"{prefix}.{name}_conv1d": entries for name in "qkv"}, width)
        places = (0, entries.size, 2 * entries.size)
        self.mixer = StateMixer(context, layer, MixLayout(span.size, span.size, self.size, self.size, places, by_key=True), conv, positions)
        self.mixer.log_decay = ShardedParameter(torch.empty(1, 1, span.size, 1, dtype=torch.float32), ShardRule(output=2))
        self.mixer.log_decay.bind(f"{prefix}.A_log", span)
        self.mixer.bias = build_by_head(f"{prefix}.dt_bias", entries)
        self.norm = GatedNorm(context, f"{prefix}.o_norm", Range.whole(self.size), self.size, config.get("rms_norm_eps", 1e-5), "sigmoid")
        self.o_proj = RowLinear(context, f"{prefix}.o_proj", inner, hidden)

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self.o_proj.defer_sum()

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """`rows` is unused: the order of tokens is in the state."""
        mixed, beta = self.projections(x).split((3 * self.heads * self.size, self.heads), -1)
        decay, gate = self.low(x).chunk(2, -1)
        out = self.mixer(mixed, self.decay_proj(decay.contiguous()), beta, batch)
        return self.o_proj(self.norm(out.flatten(1), self.gate_proj(gate.contiguous())))


def read_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(heads, entries of a head, width of the convolutions), in either spelling of config.json.
    Raises ConfigurationError for another activation than SiLU."""
    require_silu(config, "recurrent layers")
    nested = config.get("linear_attn_config") or {}
    return (
        nested.get("num_heads") or config["linear_num_heads"],
        nested.get("head_dim") or config["linear_head_dim"],
        nested.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4),
    )
