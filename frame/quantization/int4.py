"""Quantizes unquantized checkpoints while loading, tensor by tensor, to int4 with a scale and a
zero point per group of inputs (round-to-nearest)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import torch

from frame.core.interfaces.weight_format import (
    BLOCK,
    Axis,
    CanonicalWeight,
    LayerFormat,
    LayerKind,
    StoredTensor,
    WeightScheme,
    pack_nibbles,
)
from frame.quantization import Int4Options
from frame.quantization.int8 import OnlineInt8Layer
from frame.quantization.online import OnlineFormat
from frame.quantization.plain import OUTPUTS

_SMALLEST = 1e-8


class Int4(OnlineFormat):
    """Int4 for linear layers and experts, int8 for the head."""

    options: Int4Options
    options_class = Int4Options

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        if kind == "head":
            return OnlineInt8Layer(self.context.dtype)
        return OnlineInt4Layer(self.context.dtype, self.options.group_size)


@dataclass(frozen=True, slots=True)
class OnlineInt4Layer(LayerFormat):
    """int4 values, and one scale and zero point for `group` inputs, or for the greatest
    divisor of the inputs that divides `group` too."""

    dtype: torch.dtype
    group: int
    quantizes: ClassVar[bool] = True

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        size = gcd(inputs, self.group)
        return {
            "quantized": StoredTensor(torch.uint8, (OUTPUTS, Axis("input", BLOCK, BLOCK // 2))),
            "scales": StoredTensor(self.dtype, (OUTPUTS, Axis("input", size))),
            "zeros": StoredTensor(torch.int8, (OUTPUTS, Axis("input", size))),
        }

    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """The least and the largest number of a group, and 0, lie between the quantized values 0
        and 15."""
        groups = weight.float().unflatten(1, (-1, gcd(weight.shape[1], self.group)))
        low, high = groups.amin(2).clamp_max_(0), groups.amax(2).clamp_min_(0)
        scales = ((high - low) / 15).clamp_min_(_SMALLEST).to(self.dtype)
        zeros = (-low / scales.float()).round_().clamp_(0, 15)
        quantized = (groups / scales.float().unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15).to(torch.uint8).flatten(1)
        padded = torch.nn.functional.pad(quantized, (0, -quantized.shape[1] % BLOCK))
        return {"quantized": pack_nibbles(padded), "scales": scales, "zeros": zeros.to(torch.int8)}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        scheme = WeightScheme("int4", (1, gcd(inputs, self.group)), zeros=True)
        return CanonicalWeight(scheme, inputs, tensors["quantized"], tensors["scales"], tensors["zeros"])
