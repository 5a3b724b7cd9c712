"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a decay of each key entry.

A layer stores one state a sequence: the past inputs of its convolutions, and the matrix of each
head. Heads are split over the tensor-parallel ranks. Must not know a page or a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.models.layers.linear import ColumnLinear, ReplicatedLinear, RowLinear, split_range
from frame.models.layers.linear_attention.convolution import ShortConvolution, StepPositions
from frame.models.layers.linear_attention.gated_delta import GatedNorm, get_state_pages, normalize, scale_range
from frame.models.layers.linear_attention.recurrence import Recurrence, run_rows
from frame.models.layers.parameter import ShardedParameter, ShardRule

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
        self.positions = positions
        hidden, inner = config["hidden_size"], heads * self.size
        span = split_range(context, "linear heads", heads)
        self.heads, entries = span.size, scale_range(span, self.size)
        names = [f"{prefix}.{name}_proj" for name in "qkvb"]
        self.projections = ColumnLinear(context, names, hidden, (inner, inner, inner, heads))
        self.low = ReplicatedLinear(context, [f"{prefix}.f_a_proj", f"{prefix}.g_a_proj"], hidden, (self.size, self.size))
        self.decay_proj = ColumnLinear(context, [f"{prefix}.f_b_proj"], self.size, (inner,))
        self.gate_proj = ColumnLinear(context, [f"{prefix}.g_b_proj"], self.size, (inner,))
        self.conv = ShortConvolution(context, {f"{prefix}.{name}_conv1d": entries for name in "qkv"}, width)
        self.log_decay = ShardedParameter(torch.empty(1, 1, span.size, 1, dtype=torch.float32), ShardRule(output=2))
        self.log_decay.bind(f"{prefix}.A_log", span)
        self.bias = ShardedParameter(torch.empty(entries.size, dtype=torch.float32), ShardRule(output=0))
        self.bias.bind(f"{prefix}.dt_bias", entries)
        self.norm = GatedNorm(context, f"{prefix}.o_norm", self.size, config.get("rms_norm_eps", 1e-5), torch.sigmoid)
        self.o_proj = RowLinear(context, f"{prefix}.o_proj", inner, hidden)
        state = CacheTensor((span.size, self.size, self.size), torch.float32)
        self.cache = LayerCache(layer, "snapshot", (self.conv.cache_tensor, state))

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """`rows` is unused: the order of tokens is in the state."""
        pages = get_state_pages(batch)
        past, states = batch.kv.layer(self.cache.layer)
        mixed, beta = self.projections(x).split((3 * self.heads * self.size, self.heads), -1)
        mixed = self.conv(mixed, past, pages, self.positions.of(batch))
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in mixed.chunk(3, -1))
        decay, gate = self.low(x).chunk(2, -1)
        decay = (self.decay_proj(decay.contiguous()).float() + self.bias).unflatten(-1, (self.heads, -1))
        decay = -self.log_decay[0].exp() * F.softplus(decay)
        gate = self.gate_proj(gate.contiguous()).unflatten(-1, (self.heads, -1))
        inputs = Recurrence(normalize(q.float()) * self.size**-0.5, normalize(k.float()), v, decay, beta.float().sigmoid())
        out = run_rows(inputs, states, pages, batch.query_starts, batch.host.query_lens.tolist(), batch.num_decodes)
        return self.o_proj(self.norm(out, gate).flatten(1))


def read_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(heads, entries of a head, width of the convolutions), in either spelling of config.json."""
    nested = config.get("linear_attn_config") or {}
    return (
        nested.get("num_heads") or config["linear_num_heads"],
        nested.get("head_dim") or config["linear_head_dim"],
        nested.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4),
    )
