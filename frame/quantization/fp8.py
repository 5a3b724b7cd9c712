"""fp8 (e4m3) weights with scales: from fp8 checkpoints, or quantized while loading.

`fp8_format` reads the checkpoint's configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from frame.core.interfaces.weight_format import Axis, CanonicalWeight, FormatContext, LayerFormat, LayerKind, StoredTensor, WeightScheme
from frame.quantization import IgnoreOptions
from frame.quantization.fp8_format import Fp8Format, read_format
from frame.quantization.fp8_weights import BLOCK, FP8, coarsen, quantize_blocks, quantize_outputs
from frame.quantization.online import OnlineFormat
from frame.quantization.plain import INPUTS, OUTPUTS, PlainLayer

if TYPE_CHECKING:
    from pydantic import BaseModel


class Fp8(OnlineFormat):
    """fp8 for linear layers and experts: those that the checkpoint stores in fp8, or, in an
    unquantized checkpoint, all that the option `ignore` does not match."""

    options_class = IgnoreOptions

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._format = read_format(context.checkpoint_config) if context.checkpoint_config else None
        if self._format is not None and self._format.input_scale:
            self.ignored_weights = (rf".*\.{re.escape(self._format.input_scale)}$",)  # of experts, which no runner reads

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        if self._format is None or kind == "head":
            return super().describe_layer(name, kind)
        return make_layer(self._format, kind) if self._format.stores_layer(name) else PlainLayer(self.context.dtype)

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return OnlineFp8Layer(kind == "experts")


STATIC_SCALE = StoredTensor(torch.float32, (OUTPUTS,), scalar=True, optional=True)


def keep_static(scale: torch.Tensor | None) -> torch.Tensor | None:
    """The static scale of inputs; None if the checkpoint lacks one, which is zero then."""
    return scale if scale is not None and (scale.is_meta or bool((scale > 0).all())) else None


def make_layer(stored: Fp8Format, kind: LayerKind) -> Fp8Layer:
    """The layer as it is stored, without the static scales of experts' inputs."""
    return Fp8Layer(replace(stored, input_scale=None) if kind == "experts" else stored)


@dataclass(frozen=True, slots=True)
class Fp8Layer(LayerFormat):
    """`weight` e4m3 [outputs, inputs], its scale under the checkpoint's own name, and the static
    scale of its inputs where one is stored."""

    stored: Fp8Format

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        stored = self.stored
        if stored.sharing == "block":
            rows, columns = stored.block
            scale = StoredTensor(torch.float32, (Axis("output", rows, splits=True), Axis("input", columns, splits=True)))
        elif stored.sharing == "channel":
            scale = StoredTensor(torch.float32, (OUTPUTS, 1))
        else:
            scale = StoredTensor(torch.float32, (OUTPUTS,), scalar=True)
        tensors = {"weight": StoredTensor(FP8, (OUTPUTS, INPUTS)), stored.scale: scale}
        if stored.input_scale:
            tensors[stored.input_scale] = STATIC_SCALE
        return tensors

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        quantized, scales = tensors["weight"], tensors[self.stored.scale]
        if self.stored.sharing != "block":
            whole = scales if self.stored.sharing == "channel" else scales.unsqueeze(-1)
            static = tensors.get(self.stored.input_scale or "")
            return CanonicalWeight(WeightScheme("e4m3", (1, 0)), inputs, quantized, whole, input_scale=keep_static(static))
        step = quantized.shape[-2] // scales.shape[-2], quantized.shape[-1] // scales.shape[-1]
        scales, block = coarsen(scales, step, self.stored.block)
        return CanonicalWeight(WeightScheme("e4m3", block), inputs, quantized, scales)


@dataclass(frozen=True, slots=True)
class OnlineFp8Layer(LayerFormat):
    """The weight of an unquantized checkpoint, quantized while loading: one scale per output, or,
    for `experts` of sizes that are multiples of 128, per block of 128 x 128."""

    experts: bool
    quantizes: ClassVar[bool] = True

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        if self._by_blocks(inputs, *outputs):
            scales = StoredTensor(torch.float32, (Axis("output", BLOCK), Axis("input", BLOCK)))
        else:
            scales = StoredTensor(torch.float32, (OUTPUTS, 1))
        return {"quantized": StoredTensor(FP8, (OUTPUTS, INPUTS)), "scales": scales}

    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        if self._by_blocks(weight.shape[1], *outputs):
            quantized, scales = quantize_blocks(weight)
        else:
            quantized, scales = quantize_outputs(weight)
            scales = scales.unsqueeze(-1)
        return {"quantized": quantized, "scales": scales}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        quantized, scales = tensors["quantized"], tensors["scales"]
        group = (1, 0) if scales.shape[-2] == quantized.shape[-2] else (BLOCK, BLOCK)
        return CanonicalWeight(WeightScheme("e4m3", group), inputs, quantized, scales)

    def _by_blocks(self, *sizes: int) -> bool:
        return self.experts and not any(size % BLOCK for size in sizes)
