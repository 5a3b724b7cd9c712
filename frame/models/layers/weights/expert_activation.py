"""The activation between the two GEMMs of an expert, with the bias of the first.

Used by MoE runners and by experts that a GEMM kernel multiplies. Must not know routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.kernels.linear.invariant import map_elements

if TYPE_CHECKING:
    from frame.kernels.moe.grouped_gemm import Activation


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between
    -`limit` and `limit` (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) ** 2 (Nemotron)."""
    return F.relu(x).square()


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GELU(gate) * up, with the tanh approximation (Gemma)."""
    return F.gelu(gate, approximate="tanh") * up


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate).mul_(up)


def activate(experts: nn.Module, gates: torch.Tensor, ids: torch.Tensor | None = None, *, invariant: bool = False) -> torch.Tensor:
    """gates [rows, 2 * inner], results of the experts `ids` int64 [rows] -> [rows, inner]. Without
    `activation`, SiLU(gate) * up. Experts that are not `gated` have [rows, inner]. `ids` None: the
    results include the bias. invariant: see `map_elements`."""
    bias, activation = getattr(experts, "gate_up_bias", None), getattr(experts, "activation", None)
    if bias is not None and ids is not None:
        gates = gates + bias.index_select(0, ids)
    if activation is not None and not getattr(experts, "gated", True):
        gated: torch.Tensor = map_elements(activation, gates) if invariant else activation(gates)
        return gated
    gate, up = gates.chunk(2, -1)
    if invariant:
        return map_elements(activation or _silu_mul, gate, up)
    if activation is None:
        return F.silu(gate).mul_(up)
    active: torch.Tensor = activation(gate, up)
    return active


def find_activation(experts: nn.Module) -> Activation:
    """The activation in terms of the Triton kernels; "none": they have no such activation."""
    from frame.kernels.moe.grouped_gemm import SILU, Activation

    activation = getattr(experts, "activation", None)
    if activation is None:
        return SILU
    if isinstance(activation, ClampedSwiGLU):
        return Activation("clamped_swiglu", activation.alpha, activation.limit)
    if activation is gelu_mul:
        return Activation("gelu_tanh")
    return Activation("squared_relu" if activation is squared_relu else "none")
