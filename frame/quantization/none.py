"""Unquantized weights in the model's own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from frame.core.interfaces.quantization import ExpertsMethod, LayerKind, LinearMethod, QuantizationMethod
from frame.models.layers.packed import can_pack, pack_weight, packed_linear
from frame.models.layers.parameter import ShardedParameter, ShardRule
from frame.models.layers.plain_matmul import PlainMatmul

if TYPE_CHECKING:
    from torch import nn

# hidden times inner: below this size, multiplying idle experts costs less than sorting tokens
# (measured by benchmarks/moe_cpu.py)
_SMALL_EXPERT = 1 << 17
_SMALL_LAYER = 32 << 20  # bytes of `down`: the packed forms of a layer's experts take three times as much each


class PlainLinear:
    """`weight` [outputs, inputs] and its `product`; `packed` instead where the CPU multiplies
    packed weights faster."""

    def create_weights(self, layer: nn.Module, input_size: int, output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        weight = torch.empty(sum(output_sizes), input_size, dtype=dtype)
        layer.register_parameter("weight", ShardedParameter(weight, ShardRule(output=0, input=1)))
        layer.register_buffer("packed", None, persistent=False)
        layer.product = PlainMatmul(weight)  # type: ignore[assignment]

    def process_weights(self, layer: nn.Module) -> None:
        """Pack a weight that was loaded since the last call, or select its product."""
        weight: ShardedParameter = layer.weight  # type: ignore[assignment]
        if weight.numel() and can_pack(weight):
            layer.packed = pack_weight(weight)
            weight.release()
        elif weight.numel():
            layer.product = PlainMatmul(weight)  # type: ignore[assignment]

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.packed is not None:
            return packed_linear(x, layer.packed, bias)  # type: ignore[arg-type]
        return layer.product(x, layer.weight, bias)  # type: ignore[operator, no-any-return]

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """SiLU(first half of the outputs) * second half; None where a separate activation is
        faster."""
        if layer.packed is not None:
            return None
        return layer.product.multiply_gated(x, layer.weight, bias)  # type: ignore[union-attr, operator, no-any-return]


class PlainExperts:
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner].

    Small experts on a CPU with packed weights get two more forms, from which the runner selects:
    all experts concatenated, for small batches, as `packed_gate_up` (of the matrix [experts * 2 *
    inner, hidden]) and `packed_down` ([hidden, experts * inner]); and one by one, as the lists
    `packed_each_gate_up` and `packed_each_down`.
    """

    def create_weights(self, layer: nn.Module, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        rule = ShardRule(expert=0, output=1, input=2)
        layer.register_parameter("gate_up", ShardedParameter(torch.empty(num_experts, 2 * inner, hidden, dtype=dtype), rule))
        layer.register_parameter("down", ShardedParameter(torch.empty(num_experts, hidden, inner, dtype=dtype), rule))
        layer.register_buffer("packed_gate_up", None, persistent=False)
        layer.register_buffer("packed_down", None, persistent=False)

    def process_weights(self, layer: nn.Module) -> None:
        """Pack small experts."""
        gate_up: torch.Tensor = layer.gate_up  # type: ignore[assignment]
        down: torch.Tensor = layer.down  # type: ignore[assignment]
        all_gate_up, all_down = gate_up.flatten(0, 1), down.transpose(0, 1).flatten(1)
        if down[0].numel() <= _SMALL_EXPERT and down.nbytes <= _SMALL_LAYER and can_pack(all_gate_up) and can_pack(all_down):
            layer.packed_gate_up, layer.packed_down = pack_weight(all_gate_up), pack_weight(all_down)
            layer.packed_each_gate_up = [pack_weight(part) for part in gate_up]  # type: ignore[assignment]
            layer.packed_each_down = [pack_weight(part) for part in down]  # type: ignore[assignment]


class Plain(QuantizationMethod):
    """No quantization."""

    def linear(self, prefix: str, kind: LayerKind = "linear") -> LinearMethod:
        return PlainLinear()

    def experts(self, prefix: str) -> ExpertsMethod:
        return PlainExperts()
