"""e4m3 weights with one scale per output (`quant_method: w8a8_fp8`)."""

from __future__ import annotations

from typing import Any, ClassVar

from frame.core.interfaces.weight_format import LayerFormat, LayerKind
from frame.quantization.fp8 import Fp8Layer
from frame.quantization.fp8_format import Fp8Format
from frame.quantization.listed import ListedFormat


class W8A8Fp8(ListedFormat):
    """`weight` e4m3 and `weight_scale` [outputs, 1]."""

    conformance_config: ClassVar[dict[str, Any]] = {"ignore": ["lm_head"]}

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return Fp8Layer(Fp8Format("channel"))
