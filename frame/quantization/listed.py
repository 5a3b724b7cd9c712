"""`ListedFormat`: the base of the formats whose configuration lists the layers that are stored
unquantized."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.weight_format import FormatContext, LayerFormat, LayerKind, WeightFormat
from frame.quantization.fields import read_patterns
from frame.quantization.patterns import matches
from frame.quantization.plain import PlainLayer

if TYPE_CHECKING:
    from pydantic import BaseModel

_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")  # names of the list


class ListedFormat(WeightFormat):
    """`config` is the checkpoint's `quantization_config`. Heads are unquantized, unless
    `quantizes_head`."""

    quantizes_head = False

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.config: dict[str, Any] = dict(context.checkpoint_config or {})
        self._plain = tuple(name for key in _LISTS for name in read_patterns(self.config.get(key), f"quantization_config.{key}"))

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        if (kind == "head" and not self.quantizes_head) or any(matches(pattern, name) for pattern in self._plain):
            return PlainLayer(self.context.dtype)
        return self.describe_quantized(kind)

    @abstractmethod
    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        """The storage of a quantized layer."""
