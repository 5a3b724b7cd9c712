"""RMSNorm with a gate, which ends the layers of this folder. Must not know a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.kernels.linear.invariant import map_elements
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext


GateKind = Literal["silu", "sigmoid", "silu_first"]


class GatedNorm(nn.Module):
    """RMSNorm over each `group` entries of x [tokens, size], with a gate of the same shape.

    kind: "silu" or "sigmoid": the normed x is multiplied with that of the gate; "silu_first": x is,
    before it is normed (Mamba-2). span: this rank's entries of the weight `name`; all groups have
    the same weight if it has `group` entries.
    """

    def __init__(self, context: BuildContext, name: str, span: Range, group: int, eps: float, kind: GateKind = "silu") -> None:
        super().__init__()
        self.group = group
        self.eps = eps
        self.gates_first = kind == "silu_first"
        self._is_deterministic = context.deterministic
        self.sigmoid = kind == "sigmoid"
        self.weight = ShardedParameter(torch.empty(span.size, dtype=context.dtype), ShardRule(output=0))
        self.weight.bind(f"{name}.weight", span)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x` is contiguous; rows of `gate` may be strided."""
        if kernels.can_use_triton(x.device):
            from frame.kernels.elementwise.gated_norm import gated_norm

            return gated_norm(x, gate, self.weight.data, self.eps, self.group, gates_first=self.gates_first, silu=not self.sigmoid)
        activate = torch.sigmoid if self.sigmoid else F.silu
        factor = map_elements(activate, gate.float()) if self._is_deterministic else activate(gate.float())
        values = x.float() * factor if self.gates_first else x.float()
        normed = F.rms_norm(values.unflatten(-1, (-1, self.group)), (self.group,), None, self.eps).to(x.dtype)
        normed = (normed * self.weight.view(-1, self.group)).flatten(-2)
        return normed if self.gates_first else (normed.float() * factor).to(x.dtype)
