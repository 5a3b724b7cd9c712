"""The weight format of bitsandbytes checkpoints, as `BitsAndBytesSource` presents their tensors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import (
    BLOCK,
    Axis,
    CanonicalWeight,
    FormatContext,
    LayerFormat,
    LayerKind,
    StoredTensor,
    WeightFormat,
    WeightScheme,
    pack_nibbles,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

NF4_BLOCK = 64  # weights that share a scale; the source repeats scales of larger blocks
_INT8_MAX = 127.0
_FLOATS = ("F64", "F32", "F16", "BF16")
_WRAPPER = re.compile(r"^(?:model\.language_model|language_model\.model)\.")  # of a language model beside encoders
_OUTPUTS, _INPUTS = Axis("output"), Axis("input")


class BitsAndBytes(WeightFormat):
    """Reads `load_in_4bit`, `load_in_8bit` and `llm_int8_skip_modules`."""

    ignored_weights = (r".*\.weight_format$",)
    conformance_config: ClassVar[dict[str, Any]] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        config = context.checkpoint_config or {}
        kind = config.get("bnb_4bit_quant_type", "fp4")
        skipped = config.get("llm_int8_skip_modules") or ()
        if not isinstance(skipped, list | tuple) or not all(isinstance(name, str) for name in skipped):
            raise CheckpointError(f"quantization_config.llm_int8_skip_modules is {skipped!r}; a list of strings is expected.")
        self._plain = tuple(skipped)
        self._unquantized = _list_unquantized(context.folder) if context.folder is not None else frozenset()
        self._layout: LayerFormat = Int8Layer()
        if config.get("load_in_4bit"):
            if kind != "nf4":
                raise CheckpointError(f"quantization_config.bnb_4bit_quant_type is {kind!r}, but only nf4 is read: quantize with it.")
            self._layout = NF4Layer()
        elif not config.get("load_in_8bit"):
            raise CheckpointError("quantization_config sets neither load_in_4bit nor load_in_8bit: correct config.json.")

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        is_skipped = name in self._unquantized or any(f".{pattern}." in f".{name}." for pattern in self._plain)
        return PlainLayer(self.context.dtype) if kind == "head" or is_skipped else self._layout


def _list_unquantized(folder: Path) -> frozenset[str]:
    """The layers that are stored as floats: transformers 5 quantizes no experts, and the
    configuration lists neither these nor, beside encoders, layers by the names that models have."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(SafetensorError, OSError), safe_open(path, "pt") as file:  # the source names a damaged file
            weights = (name for name in file.keys() if name.endswith(".weight"))  # noqa: SIM118 - no dict
            names.update(name for name in weights if file.get_slice(name).get_dtype() in _FLOATS)
    return frozenset(_WRAPPER.sub("model.", name.removesuffix(".weight")) for name in names)


@dataclass(frozen=True, slots=True)
class PlainLayer(LayerFormat):
    """`weight` [outputs, inputs]."""

    dtype: torch.dtype

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(self.dtype, (_OUTPUTS, _INPUTS))}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("plain"), inputs, tensors["weight"])


@dataclass(frozen=True, slots=True)
class NF4Layer(LayerFormat):
    """`weight` uint8 [outputs, inputs / 2], the first of two inputs in the high nibble, and
    `absmax` [outputs, inputs / 64]."""

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {
            "weight": StoredTensor(torch.uint8, (_OUTPUTS, Axis("input", 2))),
            "absmax": StoredTensor(torch.float32, (_OUTPUTS, Axis("input", NF4_BLOCK, splits=True))),
        }

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        packed, scales = tensors["weight"], tensors["absmax"]
        quantized = torch.stack((packed >> 4, packed & 15), -1).flatten(-2)
        scheme = WeightScheme("nf4", (1, quantized.shape[-1] // scales.shape[-1]))
        return CanonicalWeight(scheme, inputs, pack_nibbles(F.pad(quantized, (0, -quantized.shape[-1] % BLOCK))), scales)


@dataclass(frozen=True, slots=True)
class Int8Layer(LayerFormat):
    """`weight` int8 [outputs, inputs] and `SCB` [outputs], the largest magnitude of each output."""

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(torch.int8, (_OUTPUTS, _INPUTS)), "SCB": StoredTensor(torch.float32, (_OUTPUTS,))}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("int8"), inputs, tensors["weight"], (tensors["SCB"] / _INT8_MAX).unsqueeze(-1))
