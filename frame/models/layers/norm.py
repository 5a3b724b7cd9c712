"""RMSNorm, with the addition of the residual stream before it, and LayerNorm. Weights are
replicated on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.collective import SupportsReduceNorm
from frame.models.layers.linear import RankSum, add_up
from frame.models.layers.parameter import ShardedParameter
from frame.models.layers.weights.layer_weight import set_buffer

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext

    AddNorm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def _add_norm(context: BuildContext, size: int) -> AddNorm | None:
    """The fused kernel: of Triton if the device runs it, or a GEMM kernel's."""
    if not kernels.can_use_triton(context.device):
        operations = context.row_operations
        return None if operations is None or not operations.can_norm(size) else operations.add_rms_norm
    from frame.kernels.elementwise.norm import add_rms_norm

    return add_rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight for x [tokens, size], computed in float32. `name` is the checkpoint
    layer.

    `offset` is added to the weight: 1 for checkpoints that store the weight minus one (Gemma). The
    result may be a view with strided rows.
    """

    twice: torch.Tensor | None  # [2 * size]: the weight twice, for 16-bit types on the CPU
    scale: torch.Tensor | None  # the weight as the kernel takes it

    def __init__(self, context: BuildContext, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.offset = offset
        self.weight = ShardedParameter(torch.empty(size, dtype=context.dtype))
        self.weight.bind(f"{name}.weight")
        self.register_buffer("twice", None, persistent=False)
        self.kernel = _add_norm(context, size)
        self.sums_partials = kernels.can_use_triton(context.device)  # the kernel takes [tokens, parts, size]
        self.register_buffer("scale", None, persistent=False)
        self._group = context.tp if isinstance(context.tp, SupportsReduceNorm) else None

    def process_weights_after_loading(self) -> None:
        """Lay the weight out for the fast path."""
        if self.offset:
            set_buffer(self, "scale", self.weight.data.float() + self.offset)  # a 16-bit sum would lose the small weights
        elif self.kernel is not None:
            set_buffer(self, "scale", self.weight.data if self.sums_partials else self.weight.data.float())
        elif self.weight.dtype is not torch.float32 and self.weight.device.type == "cpu":
            set_buffer(self, "twice", torch.cat((self.weight.data, self.weight.data)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None and self.scale is not None and not torch.compiler.is_compiling():
            return self.kernel(x, None, self.scale, self.eps)[0]
        if self.offset:
            return F.rms_norm(x.float(), self.shape, self.scale, self.eps).to(x.dtype)
        if self.twice is None or torch.compiler.is_compiling():
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        # PyTorch composes rms_norm of a dozen operations here. layer_norm is one operation, and
        # equals it where the mean is 0, as that of (x, -x) is.
        return F.layer_norm(torch.cat((x, -x), -1), self.twice.shape, self.twice, None, self.eps)[..., : self.shape[0]]

    def join_sum(self, x: RankSum, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `add_residual`, in the kernel that sums over the ranks; None where there is none."""
        if self._group is None or self.scale is None or residual is None or not len(x):
            return None
        normed = self._group.reduce_add_norm(x.summand, residual, self.scale, self.eps)
        return None if normed is None else (normed, residual)

    def add_residual(self, x: torch.Tensor | RankSum, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), in one kernel where there is one, which writes the
        sum over `residual`.

        An `x` of [tokens, parts, size] stands for the sum of its parts, computed in float32 and
        rounded.
        """
        if isinstance(x, RankSum):
            joined = self.join_sum(x, residual)
            if joined is not None:
                return joined
            x = add_up(x)
        kernel = None if torch.compiler.is_compiling() else self.kernel
        if x.dim() == 3 and (kernel is None or not self.sums_partials):
            x = x.float().sum(1).to(x.dtype)
        if kernel is not None and self.scale is not None:
            return kernel(x, residual, self.scale, self.eps)
        stream = x if residual is None else x + residual
        return self(stream), stream


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last dimension. `name` is the checkpoint
    layer."""

    bias: ShardedParameter | None

    def __init__(self, context: BuildContext, name: str, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = ShardedParameter(torch.empty(size, dtype=context.dtype))
        self.weight.bind(f"{name}.weight")
        self.bias = None
        if bias:
            self.bias = ShardedParameter(torch.empty(size, dtype=context.dtype))
            self.bias.bind(f"{name}.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def add_residual(self, x: torch.Tensor | RankSum, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        x = add_up(x)
        stream = x if residual is None else x + residual
        return self(stream), stream
