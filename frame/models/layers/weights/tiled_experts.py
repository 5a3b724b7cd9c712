"""`run_tiled`: the experts of a step in one form for any number of tokens, for
`RankContext.deterministic`.

Used by the MoE runner `torch_native`, and by `ExpertWeights` where rows have adapters, so that both
compute the same bits. Must not know routing or a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from frame.kernels.linear.invariant import InvariantMatmul
from frame.models.layers.weights.expert_activation import activate

if TYPE_CHECKING:
    from frame.core.interfaces.moe import DispatchOutput
    from frame.models.layers.weights.expert_deltas import ExpertDeltas


def run_tiled(tokens: DispatchOutput, experts: nn.Module, deltas: ExpertDeltas | None = None) -> torch.Tensor:
    """The weighted sum of each token's experts: each expert's rows in tiles, and a token's experts
    summed in the order of its ids. deltas: of the tokens' adapters."""
    count, top = tokens.ids.shape
    ids, order = tokens.ids.flatten().sort(stable=True)
    source = order // top
    counts = torch.bincount(ids, minlength=len(experts.down)).tolist()  # type: ignore[arg-type]

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.split(counts), getattr(experts, name), strict=True)
        return torch.cat([InvariantMatmul(weight)(rows) for rows, weight in pieces if len(rows)])

    x = tokens.x.index_select(0, source)
    if deltas is None:
        rows = multiply("down", activate(experts, multiply("gate_up", x), ids, invariant=True))
    else:
        rows = deltas.run_pairs(x, (source, ids), experts, multiply, invariant=True)
    if (bias := getattr(experts, "down_bias", None)) is not None:
        rows = rows + bias.index_select(0, ids)
    pairs = torch.empty_like(rows).index_copy_(0, order, rows).view(count, top, -1)
    total, *others = (pairs.float() * tokens.weights.unsqueeze(-1)).unbind(1)
    for other in others:
        total = total + other
    return total.to(tokens.x.dtype)
