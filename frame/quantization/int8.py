"""Quantizes unquantized checkpoints while loading, tensor by tensor, to int8 with one scale per
output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from frame.core.interfaces.weight_format import CanonicalWeight, LayerFormat, LayerKind, StoredTensor, WeightScheme
from frame.quantization.online import OnlineFormat
from frame.quantization.plain import INPUTS, OUTPUTS

_SMALLEST = 1e-8


class Int8(OnlineFormat):
    """Int8 for linear layers and experts."""

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return OnlineInt8Layer(self.context.dtype)


@dataclass(frozen=True, slots=True)
class OnlineInt8Layer(LayerFormat):
    """int8 [outputs, inputs] and one scale per output in the model's dtype."""

    dtype: torch.dtype
    quantizes: ClassVar[bool] = True

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"quantized": StoredTensor(torch.int8, (OUTPUTS, INPUTS)), "scales": StoredTensor(self.dtype, (OUTPUTS, 1))}

    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """The largest magnitude of a row becomes 127."""
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_min(_SMALLEST).to(self.dtype)
        return {"quantized": (weight.float() / scale.float()).round_().clamp_(-127, 127).to(torch.int8), "scales": scale}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("int8"), inputs, tensors["quantized"], tensors["scales"])
