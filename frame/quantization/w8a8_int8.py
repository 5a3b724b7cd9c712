"""int8 weights with one scale per output (`quant_method: w8a8_int8`)."""

from __future__ import annotations

from frame.core.interfaces.weight_format import LayerFormat
from frame.quantization.compressed_tensors import IntegerLayer
from frame.quantization.w8a8 import OneLayout


class W8A8Int8(OneLayout):
    """`weight` int8 and `weight_scale` [outputs, 1]."""

    def make_layout(self) -> LayerFormat:
        return IntegerLayer(self.context.dtype, 8, 0, single=False, symmetric=True, rounds_inputs=True)
