"""GEMM kernels: blocks of outputs are dequantized and multiplied, and kernels with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmKernel, Speed
from frame.core.interfaces.weight_format import CanonicalWeight
from tests.testing.held_out import Wrong


class DequantizedProduct:
    """x times one weight, which is dequantized anew in each call."""

    def __init__(self, weight: CanonicalWeight) -> None:
        self.weight = weight

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return list(self.weight.tensors.values())

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight.dequantize(x.dtype), bias)


class DequantizedExperts:
    def __init__(self, weight: CanonicalWeight) -> None:
        self.weight = weight

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return list(self.weight.tensors.values())

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out, start = x.new_zeros(len(x), self.weight.outputs), 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                out[start:end] = F.linear(x[start:end], self.weight.expert(expert).dequantize(x.dtype))
            start = end
        return out


class Dequantizing(GemmKernel):
    """Multiplies weights of any form."""

    capabilities: ClassVar[GemmCapabilities] = GemmCapabilities(
        devices=("cpu", "cuda"), speeds=tuple(Speed(kind, 0, 0.1) for kind in ("int4", "int8", "e4m3", "e2m1", "nf4"))
    )
    minima: ClassVar[bool] = True
    product: ClassVar[type] = DequantizedProduct
    experts: ClassVar[type] = DequantizedExperts

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return None

    def prepare(self, weight: CanonicalWeight) -> Any:
        return self.product(weight)

    def prepare_experts(self, weight: CanonicalWeight) -> Any:
        return self.experts(weight)


TWIN = Dequantizing
WRONG = Wrong()


class Once(DequantizedProduct):
    values: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.values is None or self.values.dtype != x.dtype:
            self.values = self.weight.dequantize(x.dtype)
        return F.linear(x, self.values, bias)


@WRONG.add("After an update of the weights the model answers as before, and takes four times the memory: dequantized values are kept.")
class KeepsValues(Dequantizing):
    product = Once


class NoBiasOfOne(DequantizedProduct):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.numel() == x.shape[-1]:
            return (self.weight.dequantize(torch.float32) @ x.float().reshape(-1)).to(x.dtype).view(*x.shape[:-1], -1)
        return super().__call__(x, bias)


@WRONG.add("A request that is alone gets another text than in company: the path for one row has no bias.")
class ForgetsBias(Dequantizing):
    product = NoBiasOfOne


class Blocks(DequantizedProduct):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= 64:
            return super().__call__(x, bias)
        out = rows.new_zeros(len(rows), self.weight.outputs)
        for block in range(len(rows) // 64):
            part = slice(64 * block, 64 * block + 64)
            out[part] = super().__call__(rows[part], bias)
        return out.view(*x.shape[:-1], -1)


@WRONG.add("The last tokens of prompts whose length is no multiple of 64 are zeros: the last block is left out.")
class WholeBlocks(Dequantizing):
    product = Blocks


class Unordered(DequantizedProduct):
    def __init__(self, weight: CanonicalWeight) -> None:
        is_permutation = weight.order is not None and weight.columns == weight.inputs
        super().__init__(replace(weight, order=None) if is_permutation else weight)


@WRONG.add("Checkpoints in act-order answer noise: the order of the inputs is ignored.")
class IgnoresOrder(Dequantizing):
    product = Unordered


class Multiplied(DequantizedProduct):
    def __init__(self, weight: CanonicalWeight) -> None:
        super().__init__(replace(weight, divides=False))


@WRONG.add("Checkpoints whose second scale divides the first are off by its square: the two are always multiplied.")
class AlwaysMultiplies(Dequantizing):
    product = Multiplied


class NoMinima(DequantizedProduct):
    def __init__(self, weight: CanonicalWeight) -> None:
        super().__init__(
            replace(weight, minima=None, zeros=None if weight.minima is None else torch.zeros_like(weight.minima, dtype=torch.int8))
        )


@WRONG.add("Checkpoints with minima answer noise: the kernel says that it takes them, and leaves them out.")
class IgnoresMinima(Dequantizing):
    product = NoMinima


class UniqueEnds(DequantizedExperts):
    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out, start = x.new_zeros(len(x), self.weight.outputs), 0
        for expert, end in enumerate(dict.fromkeys(ends.tolist())):
            out[start:end] = F.linear(x[start:end], self.weight.expert(expert).dequantize(x.dtype))
            start = end
        return out


@WRONG.add("Tokens are computed by wrong experts as soon as one expert has none: experts without rows are not counted.")
class SkipsEmptyExperts(Dequantizing):
    experts = UniqueEnds


class Wide(DequantizedProduct):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().__call__(x.float(), None if bias is None else bias.float())


@WRONG.add("Steps take twice the memory, or fail at the next layer: results are in float32, whatever the inputs are.")
class ReturnsWide(Dequantizing):
    product = Wide


class Workspace(DequantizedProduct):
    buffers: ClassVar[dict[Any, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = super().__call__(x, bias)
        key = out.shape, out.dtype, out.device
        return self.buffers.setdefault(key, torch.empty_like(out)).copy_(out)


@WRONG.add("Queries have the values of the next product of the same size: results are in one buffer of all layers.")
class SharesWorkspace(Dequantizing):
    product = Workspace


class OneInputScale(DequantizedProduct):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale = x.float().abs().amax().clamp(min=1e-9) / 127 if x.numel() else x.new_ones((), dtype=torch.float32)
        return super().__call__(((x.float() / scale).round() * scale).to(x.dtype), bias)


@WRONG.add("A request's text depends on the others: inputs are rounded to int8 with one scale for the whole step.")
class RoundsInputs(Dequantizing):
    product = OneInputScale


class SplitInputs(DequantizedProduct):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.weight.dequantize(x.dtype)
        out = x.new_zeros(*x.shape[:-1], self.weight.outputs)
        for part, columns in zip(x.split(16, -1), weight.split(16, -1), strict=True):
            out += F.linear(part, columns)
        return out if bias is None else out + bias


@WRONG.add("Quality suffers in half precision: partial sums over the inputs are rounded to the inputs' dtype.")
class RoundsSums(Dequantizing):
    product = SplitInputs


class Flat(DequantizedProduct):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.as_strided((x.numel() // x.shape[-1], x.shape[-1]), (x.shape[-1], 1), x.storage_offset())
        return super().__call__(rows, bias).view(*x.shape[:-1], -1)


@WRONG.add("Layers whose input is a part of a wider tensor read their neighbour: rows are taken for contiguous.")
class AssumesContiguous(Dequantizing):
    product = Flat


class PartialGroup(DequantizedProduct):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        width = self.weight.scheme.group[1]
        whole = self.weight.inputs // width * width if width and self.weight.order is None else self.weight.inputs
        return F.linear(x[..., :whole], self.weight.dequantize(x.dtype)[:, :whole], bias)


@WRONG.add("Layers whose inputs are no multiple of the group are wrong: the rest of the last group is left out.")
class WholeGroups(Dequantizing):
    product = PartialGroup
