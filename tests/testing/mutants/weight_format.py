"""Weight formats with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from frame.core.interfaces.weight_format import Axis, CanonicalWeight, LayerFormat, LayerKind, StoredTensor, WeightFormat, WeightScheme
from tests.testing.mutants import MutantList

GROUP = 64
OUTPUTS, INPUTS, GROUPS = Axis("output"), Axis("input"), Axis("input", GROUP, splits=True)


@dataclass(frozen=True)
class Stored(LayerFormat):
    """`weight` int8 [outputs, inputs] and `weight_scale` per 64 inputs."""

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(torch.int8, (OUTPUTS, INPUTS)), "weight_scale": StoredTensor(torch.float32, (OUTPUTS, GROUPS))}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        scales = tensors["weight_scale"]
        return CanonicalWeight(WeightScheme("int8", (1, inputs // scales.shape[-1])), inputs, tensors["weight"], scales)


class Grouped(WeightFormat):
    """All layers are stored in one way."""

    layer: ClassVar[type[LayerFormat]] = Stored

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        return self.layer()


mutant = MUTANTS = MutantList("weight_format", reference=Grouped)


@mutant
class DescribesByIdentity(Grouped):
    """Two descriptions of one layer are never equal, so merged layers are never joined."""

    class layer(Stored):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            return self is other


@mutant
class IgnoresAllWeights(Grouped):
    """Ignores the names of weights."""

    ignored_weights = (r".*\.weight",)


@mutant
class DeclaresNothing(Grouped):
    """Names no tensors of a layer."""

    class layer(Stored):
        def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
            return {}


@mutant
class SwapsTheAxes(Grouped):
    """Declares the outputs of the scales as inputs."""

    class layer(Stored):
        def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
            found = dict(super().list_tensors(inputs, outputs))
            return found | {"weight_scale": StoredTensor(torch.float32, (Axis("input"), Axis("output", GROUP, splits=True)))}


@mutant
class WholeScales(Grouped):
    """Declares that every rank has all scales, so that a rank's inputs take those of others."""

    class layer(Stored):
        def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
            whole = Axis("input", GROUP, whole=True)
            return dict(super().list_tensors(inputs, outputs)) | {"weight_scale": StoredTensor(torch.float32, (OUTPUTS, whole))}


@mutant
class NamesTheWrongGroup(Grouped):
    """Says that a scale covers twice as many inputs as it does."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            found = super().to_canonical(tensors, inputs)
            return replace(found, scheme=WeightScheme("int8", (1, 2 * found.scheme.group[1])))


@mutant
class WidensTheCodes(Grouped):
    """Returns the quantized values as int16 numbers."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            found = super().to_canonical(tensors, inputs)
            return replace(found, quantized=found.quantized.to(torch.int16))


@mutant
class DecodesInPlace(Grouped):
    """Scales the stored scales in place, so that decoding again gives other weights."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            tensors["weight_scale"].mul_(0.5)
            return super().to_canonical(tensors, inputs)


@mutant
class RepeatsTheFirstPart(Grouped):
    """Repeats the first outputs for all others."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            found = super().to_canonical(tensors, inputs)
            return replace(found, quantized=found.quantized[..., :64, :].repeat_interleave(found.outputs // 64, -2))


@mutant
class SharesOneExpert(Grouped):
    """Gives all experts the quantized values and scales of the first."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            found = super().to_canonical(tensors, inputs)
            if found.quantized.dim() < 3 or found.scales is None:
                return found
            return replace(found, quantized=found.quantized[:1].expand_as(found.quantized), scales=found.scales[:1].expand_as(found.scales))


@mutant
class RemembersTheFirstLoad(Grouped):
    """Returns the first weights after an update."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            kept = self.__dict__.setdefault("kept", {})
            key = tuple(tensors["weight"].shape), tensors["weight"].flatten()[:8].tolist()[0] if not kept else next(iter(kept))[1]
            return kept.setdefault(key, replace(super().to_canonical(tensors, inputs), quantized=tensors["weight"].clone()))


@mutant
class LosesTheOffset(Grouped):
    """Reads the quantized values as unsigned numbers, which float8 cannot hold."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            found = super().to_canonical(tensors, inputs)
            infinite = (found.quantized.float() * float("inf")).to(torch.int8)
            return replace(found, quantized=infinite, scales=tensors["weight_scale"] * float("inf"))


@mutant
class RoundsToNothing(Grouped):
    """Quantizes while loading with a scale that is a hundred times too large."""

    class layer(LayerFormat):
        quantizes: ClassVar[bool] = True

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self)

        __hash__ = None  # type: ignore[assignment]

        def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
            return {"quantized": StoredTensor(torch.int8, (OUTPUTS, INPUTS)), "scales": StoredTensor(torch.float32, (OUTPUTS, 1))}

        def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
            scales = weight.abs().amax(1, keepdim=True) * 100 / 127
            return {"quantized": (weight / scales).round().to(torch.int8), "scales": scales}

        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            return CanonicalWeight(WeightScheme("int8"), inputs, tensors["quantized"], tensors["scales"])


@mutant
class SharesScalesOfExperts(Grouped):
    """All experts have the scales of the first one."""

    class layer(Stored):
        def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
            scales = tensors["weight_scale"]
            shared = scales[:1].expand_as(scales) if scales.dim() == 3 else scales
            return super().to_canonical({**tensors, "weight_scale": shared}, inputs)


@mutant
class RoundsScalesAfterwards(Grouped):
    """Quantizes while loading by exact scales and stores them in bfloat16."""

    class layer(RoundsToNothing.layer):
        def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
            return dict(super().list_tensors(inputs, outputs)) | {"scales": StoredTensor(torch.bfloat16, (OUTPUTS, 1))}

        def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
            scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            return {"quantized": (weight / scales).round().to(torch.int8), "scales": scales.bfloat16()}
