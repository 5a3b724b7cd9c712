"""Expert multiplications in PyTorch operations, three ways; which one is taken follows `benchmarks/moe_cpu.py`.

Knows no routing and no rank: it gets tokens with the ids and weights of their experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.moe import Dispatched, MoERunner
from frame.models.layers.packed import packed_linear

_DENSE_TOKENS = 256  # more tokens make enough work for each expert


class TorchNative(MoERunner):
    """Plain weights: `gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner]; their packed form where there is one."""

    def run(self, tokens: Dispatched, experts: nn.Module) -> torch.Tensor:
        gate_up: torch.Tensor = experts.gate_up  # type: ignore[assignment]
        down: torch.Tensor = experts.down  # type: ignore[assignment]
        if getattr(experts, "packed_down", None) is not None and prefers_dense(tokens, down.shape[0]):
            return run_dense(tokens, experts.packed_gate_up, experts.packed_down, down.shape[0])  # type: ignore[arg-type]
        if _can_group(gate_up, down):
            return run_grouped(tokens, gate_up, down)
        return run_each(tokens, gate_up, down)


def run_dense(tokens: Dispatched, gate_up: torch.Tensor, down: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Two multiplications over all experts side by side, in packed form; a token's weight for the others is zero."""
    weights = tokens.x.new_zeros(tokens.x.shape[0], num_experts).scatter_add_(1, tokens.ids, tokens.weights.to(tokens.x.dtype))
    gate, up = packed_linear(tokens.x, gate_up, None).view(tokens.x.shape[0], num_experts, 2, -1).unbind(2)
    active = F.silu(gate).mul_(up).mul_(weights.unsqueeze(-1))  # [tokens, experts, inner]
    return packed_linear(active.flatten(1), down, None)


def prefers_dense(tokens: Dispatched, num_experts: int) -> bool:
    """Whether a batch is small, but not tiny beside the number of experts: then all of them cost less than sorting tokens."""
    count, top = tokens.ids.shape
    return count <= _DENSE_TOKENS and 16 * count * top >= num_experts


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


def _can_group(*weights: torch.Tensor) -> bool:
    """PyTorch's grouped multiplication wants 16-byte rows, and bfloat16 on CUDA."""
    return all(
        (weight.shape[-1] * weight.element_size()) % 16 == 0 and (weight.shape[-2] * weight.element_size()) % 16 == 0 for weight in weights
    ) and (weights[0].device.type == "cpu" or weights[0].dtype == torch.bfloat16)
