"""NVIDIA ModelOpt checkpoints: FP8 with one scale per tensor, MXFP8 and NVFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import FormatContext, LayerFormat, LayerKind
from frame.quantization.floats import NV_GROUP, Fp4Layer, Mxfp8Layer
from frame.quantization.fp8 import Fp8Layer, make_layer
from frame.quantization.fp8_format import Fp8Format
from frame.quantization.listed import ListedFormat

if TYPE_CHECKING:
    from pydantic import BaseModel

_LAYOUTS: dict[str, LayerFormat] = {
    "FP8": Fp8Layer(Fp8Format("tensor", input_scale="input_scale")),
    "MXFP8": Mxfp8Layer(),
    "NVFP4": Fp4Layer("weight", "weight_scale", NV_GROUP, "weight_scale_2"),
}


class ModelOpt(ListedFormat):
    """Reads `quant_algo`, and `exclude_modules` or `ignore`. Activations keep the model's dtype, or
    are quantized by the kernel."""

    ignored_weights = (r".*\.input_scale$",)
    conformance_config: ClassVar[dict[str, Any]] = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        algorithm = self.config.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm not in _LAYOUTS:
            raise CheckpointError(
                f"quantization_config.quant_algo is {algorithm!r}; of ModelOpt's formats {', '.join(_LAYOUTS)} are read "
                "(hf_quant_config.json sets it where config.json has no quantization_config)."
            )
        self._layout = _LAYOUTS[algorithm]

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return make_layer(self._layout.stored, kind) if isinstance(self._layout, Fp8Layer) else self._layout
