"""int8 weights with one scale per output (`quant_method: w8a8_int8`)."""

from __future__ import annotations

from typing import Any, ClassVar

from frame.core.interfaces.weight_format import LayerFormat, LayerKind
from frame.quantization.compressed_tensors import IntegerLayer
from frame.quantization.listed import ListedFormat


class W8A8Int8(ListedFormat):
    """`weight` int8 and `weight_scale` [outputs, 1]."""

    conformance_config: ClassVar[dict[str, Any]] = {"ignore": ["lm_head"]}

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return IntegerLayer(self.context.dtype, 8, 0, single=False, symmetric=True, quantizes_inputs=True)
