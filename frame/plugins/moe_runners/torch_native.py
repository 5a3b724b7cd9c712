"""Expert GEMMs in PyTorch operations, in three variants; the choice follows
`benchmarks/moe_cpu.py`.

Gates are copied out of their rows before SiLU: over short pieces with gaps it takes more than twice
as long as copy and SiLU together.

Knows no routing and no rank: it gets tokens with the ids and weights of their experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.moe import DispatchOutput, MoERunner
from frame.models.layers.packed import packed_linear, pad_row_count
from frame.models.layers.weights.expert_activation import activate
from frame.models.layers.weights.tiled_experts import run_tiled

Weights = torch.Tensor | Sequence[torch.Tensor]  # of all experts, plain or packed

_DENSE_TOKENS = 256  # above this, each expert has enough work of its own


class TorchNative(MoERunner):
    """Uses weights `gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner], or
    their packed forms if present."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        if not len(tokens.x):  # a rank may get no tokens of a step
            return torch.zeros_like(tokens.x)
        if self.context.deterministic:
            return run_tiled(tokens, experts)
        gate_up: torch.Tensor = experts.gate_up  # type: ignore[assignment]
        down: torch.Tensor = experts.down  # type: ignore[assignment]
        if getattr(experts, "activation", None) is not None or getattr(experts, "down_bias", None) is not None:
            return run_biased(tokens, experts)
        if getattr(experts, "packed_down", None) is not None:
            if prefers_dense(tokens, down.shape[0]):
                return run_dense(tokens, experts.packed_gate_up, experts.packed_down, down.shape[0])  # type: ignore[arg-type]
            return run_each(tokens, experts.packed_each_gate_up, experts.packed_each_down)  # type: ignore[arg-type]
        if _can_group(gate_up, down):
            return run_grouped(tokens, gate_up, down)
        return run_each(tokens, gate_up, down)


def run_biased(tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
    """Tokens sorted by expert, one pass per expert, with biases and the experts' activation."""
    order, source = _sorted(tokens)
    ids = tokens.ids.flatten()[order]
    counts = torch.bincount(ids, minlength=len(experts.gate_up)).tolist()  # type: ignore[arg-type]
    pieces = tokens.x.index_select(0, source).split(counts)
    gates = torch.cat([F.linear(x, weight) for x, weight in zip(pieces, experts.gate_up, strict=True)])  # type: ignore[arg-type]
    active = activate(experts, gates, ids).split(counts)
    rows = torch.cat([F.linear(x, weight) for x, weight in zip(active, experts.down, strict=True)])  # type: ignore[arg-type]
    if (bias := getattr(experts, "down_bias", None)) is not None:
        rows = rows + bias.index_select(0, ids)
    return _gather(tokens, order, source, rows)


def run_dense(tokens: DispatchOutput, gate_up: torch.Tensor, down: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Two multiplications over all experts, in packed form. The weight of an expert that a token is
    not routed to is zero."""
    weights = tokens.x.new_zeros(tokens.x.shape[0], num_experts).scatter_add_(1, tokens.ids, tokens.weights.to(tokens.x.dtype))
    gate, up = packed_linear(tokens.x, gate_up, None).view(tokens.x.shape[0], num_experts, 2, -1).unbind(2)
    active = F.silu(gate.contiguous()).mul_(up).mul_(weights.unsqueeze(-1))  # [tokens, experts, inner]
    return packed_linear(active.flatten(1), down, None)


def prefers_dense(tokens: DispatchOutput, num_experts: int) -> bool:
    """Whether computing all experts costs less than sorting tokens: the batch is small, but not
    much smaller than the experts."""
    count, top = tokens.ids.shape
    return count <= _DENSE_TOKENS and 16 * count * top >= num_experts


def run_grouped(tokens: DispatchOutput, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Tokens sorted by expert, one grouped multiplication per weight."""
    order, source = _sorted(tokens)
    ends = torch.bincount(tokens.ids.flatten(), minlength=gate_up.shape[0]).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(tokens.x.index_select(0, source), gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    return _gather(tokens, order, source, F.grouped_mm(F.silu(gate).mul_(up), down.transpose(1, 2), offs=ends))


def run_each(tokens: DispatchOutput, gate_up: Weights, down: Weights) -> torch.Tensor:
    """Tokens sorted by expert, one pass per expert in use. Each expert's number of tokens is
    rounded up, see `layers.packed`."""
    count, top = tokens.ids.shape
    ids = tokens.ids.flatten()
    counts = torch.bincount(ids, minlength=len(down))
    sizes = [pad_row_count(number) for number in counts.tolist()]
    padding = torch.tensor(sizes, device=ids.device) - counts
    numbers = torch.arange(len(ids), device=ids.device)
    places = torch.empty_like(ids)  # row of each (token, expert) pair
    places[ids.argsort()] = numbers + (padding.cumsum(0) - padding).repeat_interleave(counts, output_size=len(ids))
    source = ids.new_zeros(sum(sizes)).index_copy_(0, places, numbers // top)
    weights = tokens.x.new_zeros(sum(sizes)).index_copy_(0, places, tokens.weights.flatten().to(tokens.x.dtype)).unsqueeze(1)
    outs = []
    for expert, (x, weight) in enumerate(zip(tokens.x.index_select(0, source).split(sizes), weights.split(sizes), strict=True)):
        if len(x):
            gate, up = _linear(x, gate_up[expert]).chunk(2, -1)
            outs.append(_linear(F.silu(gate.contiguous()).mul_(up).mul_(weight), down[expert]))
    pairs = torch.cat(outs).index_select(0, places).view(count, top, -1)
    return pairs[:, 0] + pairs[:, 1] if top == 2 else pairs.sum(1)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return packed_linear(x, weight, None) if weight.is_mkldnn else F.linear(x, weight)


def _sorted(tokens: DispatchOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the order of (token, expert) pairs by expert, the token of each pair in this
    order)."""
    order = tokens.ids.flatten().argsort()
    return order, order // tokens.ids.shape[1]


def _gather(tokens: DispatchOutput, order: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Weight the pairs' results and sum them by token, in float32."""
    weighed = out * tokens.weights.flatten()[order].unsqueeze(-1)
    total = torch.zeros(tokens.x.shape, dtype=weighed.dtype, device=out.device)
    return total.index_add_(0, source, weighed).to(out.dtype)


def _can_group(*weights: torch.Tensor) -> bool:
    """Whether PyTorch's grouped multiplication supports the operands: 16-byte rows, and bfloat16 on
    CUDA. On a CPU it is one product per expert, and for bfloat16 each would be compiled for its own
    number of tokens."""
    if (weights[0].device.type == "cpu") == (weights[0].dtype == torch.bfloat16):
        return False
    rows = (size * weight.element_size() for weight in weights for size in weight.shape[-2:])
    return all(size % 16 == 0 for size in rows)
