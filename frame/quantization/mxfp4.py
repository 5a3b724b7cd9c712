"""MXFP4 checkpoints of gpt-oss: the experts' weights are e2m1 per 32 inputs, all other layers are
plain."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch

from frame.core.interfaces.weight_format import LayerFormat, LayerKind, WeightFormat
from frame.quantization.floats import MX_GROUP, Fp4Layer
from frame.quantization.plain import PlainLayer


class Mxfp4(WeightFormat):
    """The tensors `blocks` and `scales` of each expert's layer, as the model divides the
    checkpoint's."""

    conformance_config: ClassVar[dict[str, Any]] = {}

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        return Fp4Layer("blocks", "scales", MX_GROUP) if kind == "experts" else PlainLayer(self.context.dtype)

    @staticmethod
    def make_conformance_tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Exponents of usual scales: the largest ones make weights that are not finite."""
        return (120 + torch.arange(prod(shape)) % 8).view(*shape).to(dtype) if name == "scales" else None
