"""Weight formats: plain checkpoints that are rounded to e4m3 while loading, and formats with a bug
each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from frame.core.interfaces.weight_format import (
    Axis,
    CanonicalWeight,
    FormatCapabilities,
    LayerFormat,
    LayerKind,
    StoredTensor,
    WeightFormat,
    WeightScheme,
)
from tests.testing.held_out import Wrong

LARGEST = 448.0
OUTPUTS, INPUTS = Axis("output"), Axis("input")


class EqualByValue(LayerFormat):
    """Layers of one class and dtype are stored alike."""

    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.dtype == getattr(other, "dtype", None)

    def __hash__(self) -> int:
        return hash((type(self), self.dtype))


class PlainLayer(EqualByValue):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(self.dtype, (OUTPUTS, INPUTS))}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("plain"), inputs, tensors["weight"])


class FloatLayer(EqualByValue):
    """e4m3 numbers and a scale for each output."""

    quantizes: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"numbers": StoredTensor(torch.float8_e4m3fn, (OUTPUTS, INPUTS)), "scales": StoredTensor(torch.float32, (OUTPUTS, 1))}

    def find_scales(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / LARGEST

    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        scales = self.find_scales(weight)
        return {"numbers": (weight.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), "scales": scales.float()}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("e4m3"), inputs, tensors["numbers"], tensors["scales"])


class RoundedFloats(WeightFormat):
    """Heads stay as they are."""

    capabilities: ClassVar[FormatCapabilities] = FormatCapabilities(checkpoints=(None,), quant_types=("plain", "e4m3"))
    rounded: ClassVar[type[FloatLayer]] = FloatLayer

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        return PlainLayer(self.context.dtype) if kind == "head" else self.rounded(self.context.dtype)


TWIN = RoundedFloats
WRONG = Wrong()


class NoClamp(FloatLayer):
    def find_scales(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().abs().amax(dim=1, keepdim=True) / LARGEST


@WRONG.add("Models with pruned rows answer NaN: the scale of a row of zeros is 0, and it is divided by.")
class DividesByZero(RoundedFloats):
    rounded = NoClamp


class TensorScale(FloatLayer):
    def find_scales(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.float().abs().amax().clamp(min=1e-10) / LARGEST).expand(len(weight), 1)


@WRONG.add("Answers are worse than e4m3 allows: one outlier sets the scale of the whole matrix.")
class OneScale(RoundedFloats):
    rounded = TensorScale


class FirstScales(FloatLayer):
    known: torch.Tensor | None = None

    def find_scales(self, weight: torch.Tensor) -> torch.Tensor:
        if self.known is None or len(self.known) != len(weight):
            self.known = super().find_scales(weight)
        return self.known


@WRONG.add("Values and the second half of gate_up are cut off: the parts of a merged layer share the scales of the first.")
class KeepsScales(RoundedFloats):
    rounded = FirstScales


class HalfScales(FloatLayer):
    def find_scales(self, weight: torch.Tensor) -> torch.Tensor:
        return super().find_scales(weight).half().float().clamp(min=6e-8)


@WRONG.add("Layers with small weights become noise: scales are rounded to float16, where they are subnormal.")
class RoundsScales(RoundedFloats):
    rounded = HalfScales


class InverseScales(FloatLayer):
    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        encoded = dict(super().quantize_weight(weight, outputs))
        return {**encoded, "scales": 1 / encoded["scales"]}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        tensors["scales"].reciprocal_()
        return super().to_canonical(tensors, inputs)


@WRONG.add("After an update of the weights the model answers noise: decoding inverts the stored scales in place, a second time back.")
class InvertsInPlace(RoundedFloats):
    rounded = InverseScales


class FlatScales(FloatLayer):
    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("e4m3"), inputs, tensors["numbers"], tensors["scales"].reshape(-1, 1))


@WRONG.add("Models with experts do not load or mix their scales: the dimension of the experts is not kept.")
class FlattensExperts(RoundedFloats):
    rounded = FlatScales


class Unpacked(FloatLayer):
    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        return CanonicalWeight(WeightScheme("plain"), inputs, super().to_canonical(tensors, inputs).dequantize(torch.float32))


@WRONG.add("A model takes four times the memory, or fails with another dtype: weights are unpacked to float32.")
class UnpacksWide(RoundedFloats):
    rounded = Unpacked


@WRONG.add("Classifiers and models with a renamed head answer worse: a head is known by its name alone.")
class HeadByName(RoundedFloats):
    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        return PlainLayer(self.context.dtype) if name == "lm_head" else self.rounded(self.context.dtype)


class Stochastic(FloatLayer):
    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        noise = (torch.rand(weight.shape, device=weight.device) - 0.5) * 2.0**-5
        return super().quantize_weight(weight.float() * (1 + noise), outputs)


@WRONG.add("Each start and each rank has another model: numbers are rounded at random without a seed.")
class RoundsAtRandom(RoundedFloats):
    rounded = Stochastic


class SharedStorage(FloatLayer):
    buffers: ClassVar[dict[tuple[int, ...], torch.Tensor]] = {}

    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        encoded = super().quantize_weight(weight, outputs)
        shape = tuple(weight.shape)
        buffer = self.buffers.setdefault(shape, torch.empty(shape, dtype=torch.float8_e4m3fn))
        return {**encoded, "numbers": buffer.copy_(encoded["numbers"])}


@WRONG.add("Layers of one shape have the weights of the last: encoded numbers are in a buffer for each shape.")
class SharesBuffers(RoundedFloats):
    rounded = SharedStorage
