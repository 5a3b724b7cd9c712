"""Root-mean-square normalisation, with the addition of the residual stream that precedes it, and layer normalisation. Replicated on every
rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.models.layers.parameter import ShardedParameter

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext


_MANY_NUMBERS = 1 << 17  # below, the fewer calls of PyTorch's own count for more


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 inside. `name` is the checkpoint layer."""

    def __init__(self, context: BuildContext, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = ShardedParameter(torch.empty(size, dtype=context.dtype))
        self.weight.bind(f"{name}.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32 or x.device.type != "cpu" or x.numel() < _MANY_NUMBERS:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        # PyTorch composes the same of more passes, each through new memory
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().mul_(1 / self.shape[0]).add_(self.eps).rsqrt_()
        return wide.mul_(scale).mul_(self.weight).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual): the two steps that a fused kernel joins."""
        stream = x if residual is None else x + residual
        return self(stream), stream


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last dimension. `name` is the checkpoint layer."""

    def __init__(self, context: BuildContext, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = ShardedParameter(torch.empty(size, dtype=context.dtype))
        self.bias = ShardedParameter(torch.empty(size, dtype=context.dtype))
        self.weight.bind(f"{name}.weight")
        self.bias.bind(f"{name}.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
