"""Expert multiplications in PyTorch operations, three ways; which one is taken follows `benchmarks/moe_cpu.py`.

Knows no routing and no rank: it gets tokens with the ids and weights of their experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.moe import Dispatched, MoERunner

# Below these, multiplying every expert with every token costs less than sorting tokens and calling into each expert.
_DENSE_TOKENS = 128
_DENSE_EXPERT = 1 << 17  # hidden * inner


class TorchNative(MoERunner):
    """Plain weights: `gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner]."""

    def run(self, tokens: Dispatched, experts: nn.Module) -> torch.Tensor:
        gate_up: torch.Tensor = experts.gate_up  # type: ignore[assignment]
        down: torch.Tensor = experts.down  # type: ignore[assignment]
        if prefers_dense(tokens, down):
            return run_dense(tokens, gate_up, down)
        if _can_group(gate_up, down):
            return run_grouped(tokens, gate_up, down)
        return run_each(tokens, gate_up, down)


def run_dense(tokens: Dispatched, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Two multiplications over all experts laid side by side; a token's weight for the others is zero."""
    num_experts, hidden, inner = down.shape
    weights = tokens.x.new_zeros(tokens.x.shape[0], num_experts).scatter_add_(1, tokens.ids, tokens.weights.to(tokens.x.dtype))
    gate, up = F.linear(tokens.x, gate_up.flatten(0, 1)).view(-1, num_experts, 2, inner).unbind(2)
    active = F.silu(gate).mul_(up).mul_(weights.unsqueeze(-1))  # [tokens, experts, inner]
    return F.linear(active.flatten(1), down.transpose(0, 1).reshape(hidden, -1))  # a view when `down` lies hidden first


def run_grouped(tokens: Dispatched, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Tokens sorted by expert, one grouped multiplication a weight."""
    order, source = _sorted(tokens)
    ends = torch.bincount(tokens.ids.flatten(), minlength=gate_up.shape[0]).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(tokens.x.index_select(0, source), gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    return _gather(tokens, order, source, F.grouped_mm(F.silu(gate).mul_(up), down.transpose(1, 2), offs=ends))


def run_each(tokens: Dispatched, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Tokens sorted by expert, one pass an expert in use. For shapes that the grouped multiplication does not take."""
    order, source = _sorted(tokens)
    counts = torch.bincount(tokens.ids.flatten(), minlength=gate_up.shape[0]).tolist()
    outs = []
    parts = torch.split(tokens.x.index_select(0, source), counts)
    for expert, part in enumerate(parts):
        if part.shape[0]:
            gate, up = F.linear(part, gate_up[expert]).chunk(2, -1)
            outs.append(F.linear(F.silu(gate).mul_(up), down[expert]))
    return _gather(tokens, order, source, torch.cat(outs))


def _sorted(tokens: Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
    """(the order of (token, expert) pairs by expert, the token of each pair in this order)."""
    order = tokens.ids.flatten().argsort()
    return order, order // tokens.ids.shape[1]


def _gather(tokens: Dispatched, order: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Weigh the pairs' results and add them up by token, in float32."""
    weighed = out * tokens.weights.flatten()[order].unsqueeze(-1)
    total = torch.zeros(tokens.x.shape, dtype=weighed.dtype, device=out.device)
    return total.index_add_(0, source, weighed).to(out.dtype)


def prefers_dense(tokens: Dispatched, down: torch.Tensor) -> bool:
    """Whether small experts, of which this batch uses most, are best multiplied all at once."""
    num_experts, hidden, inner = down.shape
    count, top = tokens.ids.shape
    is_fast = down.device.type == "cpu" and down.dtype == torch.bfloat16  # in float32 the idle experts cost too much
    return is_fast and count <= _DENSE_TOKENS and hidden * inner <= _DENSE_EXPERT and 2 * count * top >= num_experts


def _can_group(*weights: torch.Tensor) -> bool:
    """PyTorch's grouped multiplication wants 16-byte rows, and bfloat16 on CUDA."""
    return all(
        (weight.shape[-1] * weight.element_size()) % 16 == 0 and (weight.shape[-2] * weight.element_size()) % 16 == 0 for weight in weights
    ) and (weights[0].device.type == "cpu" or weights[0].dtype == torch.bfloat16)
