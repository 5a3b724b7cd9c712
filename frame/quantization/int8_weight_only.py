"""Quantizes unquantized checkpoints while loading: int8 weights with one scale per output;
activations stay in the model's own dtype.

Halves the memory of linear layers compared with bfloat16. Experts, the head and ignored layers stay
unquantized.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from frame.core.interfaces.quantization import ExpertsMethod, LayerKind, LinearMethod, QuantizationMethod
from frame.models.layers.parameter import ShardedParameter, ShardRule
from frame.quantization import Int8Options
from frame.quantization.none import PlainExperts, PlainLinear

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import nn

    from frame.core.interfaces.quantization import QuantizationContext

# PyTorch's int8 kernel reads half the bytes but uses no matrix instructions, so it is faster only
# for few rows. Xeon with AMX, 2048 x 2048, µs at 1, 4, 8, 16 rows: 630, 1540, 2580, 5240;
# dequantized to bfloat16: 5000 to 6000 for any number.
_KERNEL_ROWS = 8


class Int8Linear:
    """`quantized` int8 [outputs, inputs] and `scale` [outputs], which replace `weight` after
    loading."""

    def create_weights(self, layer: nn.Module, input_size: int, output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        weight = torch.empty(sum(output_sizes), input_size, dtype=dtype)
        layer.register_parameter("weight", ShardedParameter(weight, ShardRule(output=0, input=1)))
        layer.register_buffer("quantized", None, persistent=False)
        layer.register_buffer("scale", None, persistent=False)

    def process_weights(self, layer: nn.Module) -> None:
        """Quantize a weight that was loaded since the last call, and free its memory."""
        weight: ShardedParameter = layer.weight  # type: ignore[assignment]
        if weight.numel():
            layer.quantized, layer.scale = quantize_weight(weight)
            weight.release()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        quantized: torch.Tensor = layer.quantized  # type: ignore[assignment]
        scale: torch.Tensor = layer.scale  # type: ignore[assignment]
        # the kernel reads past the end of rows whose length is no multiple of 32
        fits = quantized.shape[1] % 32 == 0
        if fits and x.dtype == torch.bfloat16 and x.dim() == 2 and 0 < x.shape[0] <= _KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), quantized, scale)  # noqa: SLF001
        else:
            out = F.linear(x, quantized.to(x.dtype)) * scale
        return out if bias is None else out + bias


class Int8WeightOnly(QuantizationMethod):
    """Int8 for linear layers whose checkpoint name matches no pattern of the option `ignore`."""

    def __init__(self, context: QuantizationContext, options: BaseModel | None = None) -> None:
        ignore = options.ignore if isinstance(options, Int8Options) else Int8Options().ignore
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignore)) if ignore else None

    def linear(self, prefix: str, kind: LayerKind = "linear") -> LinearMethod:
        if kind != "linear" or (self._ignored is not None and self._ignored.search(prefix)):
            return PlainLinear()
        return Int8Linear()

    def experts(self, prefix: str) -> ExpertsMethod:
        return PlainExperts()


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] -> (int8 of the same shape, scale [outputs] in the weight's dtype). The
    largest magnitude of a row becomes 127."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-8).to(weight.dtype)
    quantized = (weight.float() / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return quantized, scale
