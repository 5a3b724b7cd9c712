"""The weight format of GGUF files: blocks of ggml, as `GgufSource` presents them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import (
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
from frame_gguf.names import read_places

if TYPE_CHECKING:
    from pydantic import BaseModel

_SIZES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q8_0": (32, 34), "Q6_K": (256, 210)}  # inputs and bytes of a block


_MINIMA = WeightScheme("int4", (1, 32), minima=True)


class Gguf(WeightFormat):
    """Reads the types of the tensors from the file in the checkpoint's folder."""

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        if context.folder is None:
            raise CheckpointError("the weight format gguf reads its file in the folder of the checkpoint: set model.path to it.")
        self._places = read_places(context.folder)

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        place = self._places.get(f"{name}.weight")
        return BlockLayer(place.type) if place is not None and place.is_kept else PlainLayer(self.context.dtype)


@dataclass(frozen=True, slots=True)
class PlainLayer(LayerFormat):
    """`weight` [outputs, inputs]."""

    dtype: torch.dtype

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(self.dtype, (Axis("output"), Axis("input")))}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("plain"), inputs, tensors["weight"])


@dataclass(frozen=True, slots=True)
class BlockLayer(LayerFormat):
    """`weight` uint8 [outputs, bytes]: blocks of inputs, each with its scales."""

    type: str

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(torch.uint8, (Axis("output"), Axis("input", *_SIZES[self.type])))}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        blocks = tensors["weight"].unflatten(-1, (-1, _SIZES[self.type][1]))
        if self.type in ("Q6_K", "Q4_K"):
            return (_decode_q6 if self.type == "Q6_K" else _decode_q4)(blocks, inputs)
        if self.type == "Q4_1":  # a scale, and what is added
            minima = -_floats(blocks[..., 2:4])
            return CanonicalWeight(_MINIMA, inputs, blocks[..., 4:].flatten(-2), _floats(blocks[..., :2]), minima=minima)
        scales, quantized = _floats(blocks[..., :2]), blocks[..., 2:].flatten(-2)
        if self.type == "Q4_0":  # the low nibbles are the first half of a block, as in the canonical form
            return CanonicalWeight(WeightScheme("int4", (1, 32)), inputs, quantized, scales)
        return CanonicalWeight(WeightScheme("int8", (1, 32)), inputs, quantized.view(torch.int8), scales)


def _decode_q4(blocks: torch.Tensor, inputs: int) -> CanonicalWeight:
    """Two float16 factors, 12 bytes of eight scales and eight minima with 6 bits each, and 128 of
    nibbles, 32 low ones before the 32 high ones of the same bytes."""
    outer, small, quantized = blocks.split((4, 12, 128), -1)
    scales, minima, rest = small.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scales & 63, (rest & 15) | (scales >> 2 & 48)), -1)
    minima = torch.cat((minima & 63, (rest >> 4) | (minima >> 2 & 48)), -1)
    factors = outer.contiguous().view(torch.float16).float()
    quantized = quantized.unflatten(-1, (4, 1, 32))
    quantized = pack_nibbles(torch.cat((quantized & 15, quantized >> 4), -2).flatten(-3))
    scales, minima = factors[..., :1] * scales, factors[..., 1:] * minima
    return CanonicalWeight(_MINIMA, inputs, quantized.flatten(-2), scales.flatten(-2), minima=minima.flatten(-2))


def _decode_q6(blocks: torch.Tensor, inputs: int) -> CanonicalWeight:
    """128 bytes of low nibbles, 64 of pairs of high bits, 16 int8 scales, and a float16 scale."""
    low, high, inner, outer = blocks.split((128, 64, 16, 2), -1)
    low = low.unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), -2).flatten(-3)
    high = high.unflatten(-1, (2, 1, 32))
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3)
    quantized = (low | high << 4).view(torch.int8) - 32
    scales = _floats(outer).float().unsqueeze(-1) * inner.contiguous().view(torch.int8)
    return CanonicalWeight(WeightScheme("int8", (1, 16)), inputs, quantized.flatten(-2), scales.flatten(-2))


def _floats(pairs: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2] -> float16 [...]."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)
