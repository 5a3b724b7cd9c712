"""The gated feed-forward layer: down(activation(gate(x)) * up(x)), gate and up in one GEMM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.errors import ConfigurationError
from frame.kernels.linear.invariant import map_elements, silu
from frame.models.layers.linear import ColumnLinear, RowLinear

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext


Activation = Literal["silu", "gelu_tanh"]

_SHORT_ROW = 256
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"
}  # fmt: skip


def read_activation(config: Mapping[str, Any], key: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation that config.json names. Raises ConfigurationError for one that `GatedMLP` does
    not compute."""
    name = config.get(key) or default
    if name not in _ACTIVATIONS:
        known = " and ".join(get_args(Activation))
        raise ConfigurationError(f"{key} {name!r} is not implemented here, only {known}: set model.implementation: transformers.")
    return _ACTIVATIONS[name]


def require_silu(config: Mapping[str, Any], what: str, key: str = "hidden_act") -> None:
    """Raise ConfigurationError if config.json names another activation for `what`, which has SiLU
    alone."""
    if (name := config.get(key) or "silu") not in ("silu", "swish"):
        raise ConfigurationError(f"{key} {name!r} is not implemented here for {what}, only silu: set model.implementation: transformers.")


def _silu_mul(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The fused activation kernel, if the device runs Triton."""
    if not kernels.can_use_triton(device):
        return None
    from frame.kernels.elementwise.activation import silu_mul

    return silu_mul


def choose_gelu(context: BuildContext) -> Callable[[torch.Tensor], torch.Tensor]:
    """GELU with the tanh approximation."""
    gelu = partial(F.gelu, approximate="tanh")
    return partial(map_elements, gelu) if context.deterministic else gelu


class PlainMLP(nn.Module):
    """A feed-forward part without a gate, down(activation(up(x))): [tokens, hidden] -> [tokens,
    hidden]. `prefix` is the checkpoint name that holds up_proj and down_proj."""

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        hidden_size: int,
        inner_size: int,
        bias: bool,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.up_proj = ColumnLinear(context, (f"{prefix}.up_proj",), hidden_size, (inner_size,), bias)
        self.down_proj = RowLinear(context, f"{prefix}.down_proj", inner_size, hidden_size, bias)
        self.activation = activation

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self.down_proj.defer_sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class GatedMLP(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. `prefix` is the checkpoint name that holds gate_proj,
    up_proj and down_proj."""

    def __init__(
        self, context: BuildContext, prefix: str, hidden_size: int, inner_size: int, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.activation = activation
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up_proj = ColumnLinear(context, names, hidden_size, (inner_size, inner_size), bias)
        self.down_proj = RowLinear(context, f"{prefix}.down_proj", inner_size, hidden_size, bias)
        self.kernel = _silu_mul(context.device)
        self.silu = silu if context.deterministic else F.silu
        self.gelu = choose_gelu(context)

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self.down_proj.defer_sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "gelu_tanh":
            gate, up = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(self.gelu(gate).mul_(up))
        inner = self.gate_up_proj.apply_gated(x)
        if inner is not None:
            return self.down_proj(inner)
        gate_up = self.gate_up_proj(x)
        if self.kernel is not None and not torch.compiler.is_compiling():
            return self.down_proj(self.kernel(gate_up))
        gate, up = gate_up.chunk(2, -1)
        # on short strided rows SiLU takes more than twice as long as on a contiguous copy
        gate = gate.contiguous() if gate.shape[-1] <= _SHORT_ROW and gate.device.type == "cpu" else gate
        return self.down_proj(self.silu(gate).mul_(up))
