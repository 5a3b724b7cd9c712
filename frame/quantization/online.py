"""`OnlineFormat`: the base of the formats that quantize unquantized checkpoints while loading."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from frame.core.interfaces.weight_format import FormatContext, LayerFormat, LayerKind, WeightFormat
from frame.quantization import IgnoreOptions, OnlineOptions
from frame.quantization.plain import PlainLayer

if TYPE_CHECKING:
    from pydantic import BaseModel


class OnlineFormat(WeightFormat):
    """Quantizes linear layers and experts whose checkpoint name matches no pattern of the option
    `ignore`, and with the option `head` the head."""

    options_class: ClassVar[type[IgnoreOptions]] = OnlineOptions

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.options = options if isinstance(options, self.options_class) else self.options_class()
        self._has_head = isinstance(self.options, OnlineOptions) and self.options.head
        ignored = self.options.ignore
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored)) if ignored else None

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        if (kind == "head" and not self._has_head) or (self._ignored is not None and self._ignored.search(name) is not None):
            return PlainLayer(self.context.dtype)
        return self.describe_quantized(kind)

    @abstractmethod
    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        """The form of a layer that is quantized."""
