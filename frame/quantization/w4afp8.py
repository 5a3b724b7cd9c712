"""W4AFP8 checkpoints (DeepSeek R1 and V3 as SGLang and vLLM read them): experts in int4 per 128
inputs, other linear layers in e4m3 by blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import Axis, CanonicalWeight, FormatContext, LayerFormat, LayerKind, StoredTensor
from frame.quantization.fp8 import Fp8Layer
from frame.quantization.fp8_format import Fp8Format, read_block
from frame.quantization.integers import Integers, unpack_pairs
from frame.quantization.listed import ListedFormat
from frame.quantization.plain import OUTPUTS

if TYPE_CHECKING:
    from pydantic import BaseModel

_GROUP = 128  # inputs that share a scale
_SIGNS = 0x88  # flips the signs of both nibbles of a byte: two's complement to unsigned


class W4AFp8(ListedFormat):
    """Reads `ignored_layers`, `weight_block_size` and `group_size`. Activations keep the model's
    dtype, or are quantized by the kernel."""

    ignored_weights = (r".*\.input_scale$",)
    conformance_config: ClassVar[dict[str, Any]] = {"quant_method": "w4afp8"}

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        config = self.config
        if config.get("group_size", _GROUP) != _GROUP:
            raise CheckpointError(f"quantization_config.group_size is {config['group_size']!r}; of W4AFP8's groups {_GROUP} is read.")
        self._linear = Fp8Layer(Fp8Format("block", "weight_scale_inv", block=read_block(config.get("weight_block_size") or (128, 128))))

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return W4ExpertsLayer(self.context.dtype) if kind == "experts" else self._linear


@dataclass(frozen=True, slots=True)
class W4ExpertsLayer(LayerFormat):
    """`weight` int8 [outputs, inputs / 2], the first of two signed inputs in the low nibble, and
    `weight_scale_inv` [outputs, inputs / 128]."""

    dtype: torch.dtype

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {
            "weight": StoredTensor(torch.int8, (OUTPUTS, Axis("input", 2))),
            "weight_scale_inv": StoredTensor(torch.float32, (OUTPUTS, Axis("input", _GROUP, splits=True))),
        }

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        quantized = unpack_pairs(tensors["weight"].view(torch.uint8) ^ _SIGNS)
        return Integers(4, quantized, tensors["weight_scale_inv"]).to_canonical(self.dtype)
