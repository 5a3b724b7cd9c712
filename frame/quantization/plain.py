"""Unquantized weights in the model's own dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from frame.core.interfaces.weight_format import Axis, CanonicalWeight, LayerFormat, LayerKind, StoredTensor, WeightFormat, WeightScheme

OUTPUTS, INPUTS = Axis("output"), Axis("input")


@dataclass(frozen=True, slots=True)
class PlainLayer(LayerFormat):
    """`weight` [outputs, inputs]."""

    dtype: torch.dtype

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(self.dtype, (OUTPUTS, INPUTS))}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("plain"), inputs, tensors["weight"])


class Plain(WeightFormat):
    """No quantization."""

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        return PlainLayer(self.context.dtype)
