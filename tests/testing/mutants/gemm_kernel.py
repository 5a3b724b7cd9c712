"""GEMM kernels with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from frame.core.interfaces.gemm_kernel import Gemm, GemmCapabilities, GemmKernel, GroupedGemm, Speed
from frame.core.interfaces.weight_format import CanonicalWeight
from tests.testing.mutants import MutantList


class Dequantized(GemmKernel):
    """Dequantizes and multiplies."""

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return None

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return DenseGemm(self, weight)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return DenseExperts(self, weight)

    def dense(self, weight: CanonicalWeight, dtype: torch.dtype) -> torch.Tensor:
        return weight.dequantize(dtype)

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, dense, bias)

    def split(self, ends: torch.Tensor) -> list[int]:
        return ends.tolist()  # type: ignore[no-any-return]


class DenseGemm:
    """x times one weight."""

    def __init__(self, kernel: Dequantized, weight: CanonicalWeight) -> None:
        self.kernel, self.weight = kernel, weight
        self.tensors = list(weight.tensors.values())

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.multiply(x, self.kernel.dense(self.weight, x.dtype), bias)


class DenseExperts:
    """Rows sorted by expert times the weights of their experts."""

    def __init__(self, kernel: Dequantized, weight: CanonicalWeight) -> None:
        self.kernel, self.weight = kernel, weight
        self.tensors = list(weight.tensors.values())

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out, start = x.new_zeros(len(x), self.weight.outputs), 0
        for expert, end in enumerate(self.kernel.split(ends)):
            out[start:end] = F.linear(x[start:end], self.kernel.dense(self.weight.expert(expert), x.dtype))
            start = end
        return out


SPEEDS = tuple(Speed(quantized, 0, 0.1) for quantized in ("int4", "int8", "e2m1", "e4m3"))  # type: ignore[arg-type]
mutant = MUTANTS = MutantList(
    "gemm_kernel", reference=Dequantized, capabilities=GemmCapabilities(("cpu", "cuda"), SPEEDS, dtypes=("float32",))
)


@mutant
class ForgetsTheBias(Dequantized):
    """Leaves out the bias of the product."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, dense)


def with_weight(change: Callable[[CanonicalWeight], dict[str, Any]]) -> Any:
    """The method `dense` of a weight that is changed first."""
    return lambda self, weight, dtype: replace(weight, **change(weight)).dequantize(dtype)


mutant.each(
    Dequantized,
    "dense",
    ("IgnoresZeroPoints", "Multiplies as if there were no zero points.", with_weight(lambda weight: {"zeros": None})),
    ("IgnoresTheOrder", "Multiplies the inputs in their own order in act-order.", with_weight(lambda weight: {"order": None})),
    ("IgnoresTheOuterScale", "Leaves out the second scale.", with_weight(lambda weight: {"outer": None})),
    (
        "InvertsTheOuterScale",
        "Divides by the second scale where it multiplies, and the reverse.",
        with_weight(lambda weight: {"divides": not weight.divides}),
    ),
)


@mutant
class SwapsNibbles(Dequantized):
    """Takes the high nibble of a byte for the first input."""

    def dense(self, weight: CanonicalWeight, dtype: torch.dtype) -> torch.Tensor:
        quantized = weight.quantized
        if quantized.dtype == torch.uint8:
            quantized = quantized << 4 | quantized >> 4
        return replace(weight, quantized=quantized).dequantize(dtype)


@mutant
class UsesTheFirstScaleOfAnOutput(Dequantized):
    """Scales all groups of an output by the first group's scale."""

    def dense(self, weight: CanonicalWeight, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scales is not None
        return replace(weight, scales=weight.scales[..., :1].expand_as(weight.scales)).dequantize(dtype)


@mutant
class ScalesByTheBatch(Dequantized):
    """Normalizes all rows by their largest value, so that a row depends on the others."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale = x.abs().amax() if x.numel() else 1.0
        return F.linear(x / scale, dense) * scale + (0 if bias is None else bias)


@mutant
class WrongForManyRows(Dequantized):
    """Is a fifth too large from 70 rows on."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = F.linear(x, dense, bias)
        return out * 1.2 if len(x) >= 70 else out


@mutant
class ChangesItsInput(Dequantized):
    """Scales the input in place."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = F.linear(x, dense, bias)
        x.mul_(0.5)
        return out


@mutant
class FlattensRows(Dequantized):
    """Returns two dimensions for any input."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x.reshape(-1, x.shape[-1]), dense, bias)


@mutant
class ReturnsFloat64(Dequantized):
    """Returns another dtype than that of the input."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, dense, bias).double()


@mutant
class SkipsEmptyExperts(Dequantized):
    """Takes the next expert's weights for an expert without rows."""

    def split(self, ends: torch.Tensor) -> list[int]:
        return sorted(set(ends.tolist()) - {0})


@mutant
class KeepsADequantizedCopy(Dequantized):
    """Lists the quantized values as its tensors but multiplies a copy, which an update does not
    reach."""

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        product = DenseGemm(self, weight)
        copy = replace(weight, quantized=weight.quantized.clone())
        product.weight = copy
        return product


@mutant
class AddsTheBiasToRowsAlone(Dequantized):
    """Leaves out the bias where rows have more than one dimension."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().multiply(x, dense, bias if x.dim() == 2 else None)


class NoRows(DenseExperts):
    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return super().__call__(x, ends) if len(x) else x.new_empty(0)


@mutant
class LosesTheOutputsOfNoRows(Dequantized):
    """Returns one dimension where no expert has a row."""

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return NoRows(self, weight)


@mutant
class CountsUnquantizedWeights(Dequantized):
    """Tells the memory plan the bytes of unquantized weights."""

    def count_bytes(self, weight: CanonicalWeight) -> int:
        return weight.quantized.shape[:-1].numel() * weight.inputs * 4


@mutant.using(capabilities=replace(MUTANTS.reference.capabilities, batch_invariant=True))
class SplitsSumsOfFewRows(Dequantized):
    """States that it is batch-invariant, and adds two halves of the inputs for less than eight
    rows."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.numel() >= 8 * x.shape[-1]:
            return super().multiply(x, dense, bias)
        half = x.shape[-1] // 2
        return F.linear(x[..., :half], dense[:, :half], bias) + F.linear(x[..., half:], dense[:, half:])


class ExpertsOf(Dequantized):
    """Correct: makes the product of experts from `kind`."""

    kind: type = DenseExperts

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return self.kind(self, weight)  # type: ignore[no-any-return]


class ExpertsOnce(DenseExperts):
    def __init__(self, kernel: Dequantized, weight: CanonicalWeight) -> None:
        super().__init__(kernel, weight)
        self.weights = weight.dequantize(torch.float32)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        parts = x.tensor_split(ends.long().cpu())
        products = [F.linear(part, weight.to(x.dtype)) for part, weight in zip(parts, self.weights, strict=False)]
        return torch.cat([*products, x.new_zeros(len(parts[-1]), self.weight.outputs)])


class ExpertsToTheEnd(DenseExperts):
    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return super().__call__(x, ends)[: int(ends[-1])]


class DenseRows(DenseExperts):
    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return super().__call__(torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset()), ends)


MUTANTS.each(
    ExpertsOf,
    "kind",
    ("ExpertsFromTheStart", "Multiplies experts by the values that they had when they were prepared.", ExpertsOnce),
    ("RowsToTheEnd", "Returns no rows after the last end.", ExpertsToTheEnd),
    ("ExpertsOfDenseRows", "Reads the rows of experts as if they were contiguous.", DenseRows),
)


@mutant
class NaNIsZero(Dequantized):
    """Computes with 0 in place of NaN."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().multiply(x.nan_to_num(), dense, bias)


class GatedGemm(DenseGemm):
    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self(x).chunk(2, -1)
        return F.silu(gate) * up


@mutant
class GatedWithoutBias(Dequantized):
    """Leaves out the bias of the gated product."""

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return GatedGemm(self, weight)


@mutant
class KeepsInputs(Dequantized):
    """Keeps the input of each product."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.__dict__.setdefault("inputs", []).append(x)
        return super().multiply(x, dense, bias)


@mutant
class OverwritesRepeatedInputs(Dequantized):
    """Writes the columns of an act-order weight to their inputs and does not add them."""

    def dense(self, weight: CanonicalWeight, dtype: torch.dtype) -> torch.Tensor:
        if weight.order is None:
            return super().dense(weight, dtype)
        columns = replace(weight, order=None, inputs=weight.columns).dequantize(dtype)
        whole = columns.new_zeros(weight.outputs, weight.inputs)
        whole[:, weight.order.long()] = columns
        return whole


@mutant
class BiasOfTheFirstRows(Dequantized):
    """Adds the bias to the first thousand rows alone."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = F.linear(x, dense)
        if bias is not None:
            out[:1000] += bias
        return out


@mutant
class SetsThePrecision(Dequantized):
    """Lets torch multiply float32 in TF32, in the whole process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.set_float32_matmul_precision("medium")
