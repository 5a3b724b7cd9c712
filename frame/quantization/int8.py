"""Quantizes unquantized checkpoints while loading, tensor by tensor, to int8 with one scale per
output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from frame.core.interfaces.weight_format import (
    FormatContext,
    LayerFormat,
    LayerKind,
    PackedWeight,
    StoredTensor,
    WeightFormat,
    WeightScheme,
)
from frame.quantization import IgnoreOptions
from frame.quantization.plain import INPUTS, OUTPUTS, PlainLayer
from frame.quantization.rounding import IgnoredLayers

if TYPE_CHECKING:
    from pydantic import BaseModel

_SMALLEST = 1e-8


class Int8(WeightFormat):
    """Int8 for linear layers and experts whose checkpoint name matches no pattern of `ignore`."""

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._ignored = IgnoredLayers(options if isinstance(options, IgnoreOptions) else IgnoreOptions())

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        dtype = self.context.dtype
        return PlainLayer(dtype) if kind == "head" or self._ignored.matches(name) else RoundedInt8Layer(dtype)


@dataclass(frozen=True, slots=True)
class RoundedInt8Layer(LayerFormat):
    """int8 [outputs, inputs] and one scale per output in the model's dtype."""

    dtype: torch.dtype
    rounds: ClassVar[bool] = True

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"codes": StoredTensor(torch.int8, (OUTPUTS, INPUTS)), "scales": StoredTensor(self.dtype, (OUTPUTS, 1))}

    def encode(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """The largest magnitude of a row becomes 127."""
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_min(_SMALLEST).to(self.dtype)
        return {"codes": (weight.float() / scale.float()).round_().clamp_(-127, 127).to(torch.int8), "scales": scale}

    def decode(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> PackedWeight:
        return PackedWeight(WeightScheme("int8"), inputs, tensors["codes"], tensors["scales"])
