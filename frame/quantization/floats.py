"""Layers of floats with scales per block of inputs: MXFP4, NVFP4 and MXFP8 as compressed-tensors
and ModelOpt store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from frame.core.interfaces.weight_format import BLOCK, Axis, CanonicalWeight, LayerFormat, StoredTensor, WeightScheme, pack_nibbles
from frame.quantization.integers import unpack_pairs
from frame.quantization.plain import INPUTS, OUTPUTS

MX_GROUP, NV_GROUP = 32, 16
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Fp4Layer(LayerFormat):
    """uint8 [outputs, inputs / 2], the first of two inputs in the low nibble, and scales per
    `group` inputs.

    `weight`, `scale`: names. Scales are e8m0 exponents in bytes if `outer` is empty, otherwise e4m3
    with one number per layer, named `outer`, which multiplies them or, with `divides`, divides
    them.
    """

    weight: str
    scale: str
    group: int
    outer: str = ""
    divides: bool = False

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        by_group = Axis("input", self.group)
        tensors = {
            self.weight: StoredTensor(torch.uint8, (OUTPUTS, Axis("input", 2))),
            self.scale: StoredTensor(torch.float8_e4m3fn if self.outer else torch.uint8, (OUTPUTS, by_group)),
        }
        if self.outer:
            tensors[self.outer] = StoredTensor(torch.float32, (OUTPUTS,), scalar=True)
        return tensors

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        packed, scales = tensors[self.weight], tensors[self.scale]
        quantized = unpack_pairs(packed)
        quantized = pack_nibbles(F.pad(quantized, (0, -quantized.shape[-1] % BLOCK)))
        scheme = WeightScheme("e2m1", (1, self.group))
        if self.outer:
            return CanonicalWeight(scheme, inputs, quantized, scales, outer=tensors[self.outer], divides=self.divides)
        return CanonicalWeight(scheme, inputs, quantized, _exp2(scales))


@dataclass(frozen=True, slots=True)
class Mxfp8Layer(LayerFormat):
    """`weight` e4m3 [outputs, inputs] and `weight_scale`, e8m0 exponents in bytes per 32 inputs."""

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {
            "weight": StoredTensor(torch.float8_e4m3fn, (OUTPUTS, INPUTS)),
            "weight_scale": StoredTensor(torch.uint8, (OUTPUTS, Axis("input", MX_GROUP))),
        }

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("e4m3", (1, MX_GROUP)), inputs, tensors["weight"], _exp2(tensors["weight_scale"]))


def _exp2(exponents: torch.Tensor) -> torch.Tensor:
    """Bytes with a bias of 127 -> bfloat16 powers of two, which are exact."""
    return torch.exp2(exponents.float() - _EXPONENT_BIAS).to(torch.bfloat16)
