"""Plain weights in the model's own type, multiplied as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from frame.core.interfaces.quantization import ExpertsMethod, LayerKind, LinearMethod, QuantizationMethod
from frame.models.layers.packed import can_pack, pack, packed_linear
from frame.models.layers.parameter import ShardedParameter, ShardRule

if TYPE_CHECKING:
    from torch import nn


class PlainLinear:
    """`weight` [outputs, inputs]; where the CPU likes it better, `packed` instead."""

    def create(self, layer: nn.Module, input_size: int, output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        weight = torch.empty(sum(output_sizes), input_size, dtype=dtype)
        layer.register_parameter("weight", ShardedParameter(weight, ShardRule(output=0, input=1)))
        layer.register_buffer("packed", None, persistent=False)

    def finish(self, layer: nn.Module) -> None:
        """Pack a weight that was loaded since the last time."""
        weight: ShardedParameter = layer.weight  # type: ignore[assignment]
        if weight.numel() and can_pack(weight):
            layer.packed = pack(weight)
            weight.release()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.packed is not None:
            return packed_linear(x, layer.packed, bias)  # type: ignore[arg-type]
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return F.linear(x, weight, bias)


class PlainExperts:
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner]."""

    def create(self, layer: nn.Module, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        rule = ShardRule(expert=0, output=1, input=2)
        layer.register_parameter("gate_up", ShardedParameter(torch.empty(num_experts, 2 * inner, hidden, dtype=dtype), rule))
        layer.register_parameter("down", ShardedParameter(torch.empty(num_experts, hidden, inner, dtype=dtype), rule))

    def finish(self, layer: nn.Module) -> None:
        """On the CPU `down` lies hidden first in memory, so that all experts side by side are one matrix without a copy."""
        down: torch.Tensor = layer.down  # type: ignore[assignment]
        if down.device.type == "cpu":
            down.data = down.data.transpose(0, 1).contiguous().transpose(0, 1)


class Plain(QuantizationMethod):
    """No quantization: every layer gets the same."""

    def linear(self, prefix: str, kind: LayerKind = "linear") -> LinearMethod:
        return PlainLinear()

    def experts(self, prefix: str) -> ExpertsMethod:
        return PlainExperts()
