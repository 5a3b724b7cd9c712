"""Formats that store all linear layers with 8 bits and one scale per output, as SGLang writes
them.

Used by `w8a8_int8` and `w8a8_fp8`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from frame.core.interfaces.weight_format import FormatContext, LayerFormat, LayerKind, WeightFormat
from frame.quantization.patterns import matches
from frame.quantization.plain import PlainLayer

if TYPE_CHECKING:
    from pydantic import BaseModel


class OneLayout(WeightFormat):
    """All layers except heads and those that `quantization_config` lists (`ignore`,
    `modules_to_not_convert`) are stored in one way."""

    conformance_config: ClassVar[dict[str, Any]] = {"ignore": ["lm_head"]}

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        config = context.checkpoint_config or {}
        self._plain = (*(config.get("ignore") or ()), *(config.get("modules_to_not_convert") or ()))

    def make_layout(self) -> LayerFormat:
        """The storage of a quantized layer."""
        raise NotImplementedError

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        if kind == "head" or any(matches(pattern, name) for pattern in self._plain):
            return PlainLayer(self.context.dtype)
        return self.make_layout()
