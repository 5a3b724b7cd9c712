"""e4m3 weights with one scale per output (`quant_method: w8a8_fp8`)."""

from __future__ import annotations

from frame.core.interfaces.weight_format import LayerFormat
from frame.quantization.fp8 import Fp8Layer
from frame.quantization.fp8_format import Fp8Format
from frame.quantization.w8a8 import OneLayout


class W8A8Fp8(OneLayout):
    """`weight` e4m3 and `weight_scale` [outputs, 1]."""

    def make_layout(self) -> LayerFormat:
        return Fp8Layer(Fp8Format("channel"))
