"""Expert GEMMs by PyTorch's grouped matrix multiplication over tokens sorted by expert, without
synchronising with the host.

Knows no routing and no rank: it gets tokens with the ids and weights of their experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.moe import DispatchOutput, MoERunner
from frame.models.layers.weights.expert_activation import activate


class TorchGrouped(MoERunner):
    """Needs bfloat16 weights: `gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden,
    inner], sizes multiples of 8."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        gate_up: torch.Tensor = experts.gate_up  # type: ignore[assignment]
        down: torch.Tensor = experts.down  # type: ignore[assignment]
        (count, top), num_experts = tokens.ids.shape, len(gate_up)
        ids, order = tokens.ids.flatten().sort()
        ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True, out_int32=True)
        source = order.div(top, rounding_mode="floor")
        gates = F.grouped_mm(tokens.x.index_select(0, source), gate_up.transpose(1, 2), offs=ends)
        rows = F.grouped_mm(activate(experts, gates, ids), down.transpose(1, 2), offs=ends)
        if (bias := getattr(experts, "down_bias", None)) is not None:
            rows = rows + bias.index_select(0, ids)
        pairs = torch.empty_like(rows).index_copy_(0, order, rows).view(count, top, rows.shape[1])
        return torch.einsum("tkh,tk->th", pairs.float(), tokens.weights).to(tokens.x.dtype)
