"""GEMMs with unquantized weights: one matrix, or one for each expert.

Used by GEMM plugins and tied heads. Depends on no layer and no format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F

from frame.kernels.linear.invariant import InvariantMatmul
from frame.models.layers.packed import packed_linear
from frame.models.layers.plain_matmul import PlainMatmul


class PlainGemm:
    """The GEMM with a weight [outputs, inputs], while it keeps its size and address."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.tensors = (weight,)
        self._matmul = PlainMatmul(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._matmul(x, self.weight, bias)

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """SiLU(first half of the outputs) * second half; None where a separate activation is
        faster."""
        return self._matmul.multiply_gated(x, self.weight, bias)


class InvariantGemm:
    """The GEMM of `RankContext.deterministic`: the bits of `InvariantMatmul`, by faster kernels
    where these gave the same bits for the first weight of a form."""

    _tested: ClassVar[dict[tuple[object, ...], PlainMatmul]] = {}  # by the form of a weight

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.tensors = (weight,)
        self._product = InvariantMatmul(weight)
        self._fast = self._share("", self._product)
        self._gated: PlainMatmul | None = None  # tested with the first rows, since few layers have gates

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._fast.multiply_few(x, self.weight)  # which would add the bias before rounding
        if out is None:
            return self._product(x, bias)
        return out if bias is None else out + bias

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `PlainGemm`."""
        if bias is not None or x.device.type == "cpu":
            return None
        if self._gated is None:
            from frame.kernels.elementwise.activation import silu_mul

            self._gated = self._share("gated", lambda rows: silu_mul(self._product(rows)))
        return self._gated.multiply_gated(x, self.weight)

    def _share(self, what: str, multiply: Callable[[torch.Tensor], torch.Tensor]) -> PlainMatmul:
        """The kernels that give the bits of `multiply` with weights of this form."""
        weight = self.weight
        form = (what, *weight.shape, *weight.stride(), weight.dtype, weight.device, weight.data_ptr() % 16)
        if form not in self._tested:
            matmul = self._tested[form] = PlainMatmul(weight)
            matmul.keep_equal(weight, multiply, gated=bool(what))
        return self._tested[form]


class PackedGemm:
    """The GEMM with a weight in oneDNN's layout (`frame.models.layers.packed`)."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed
        self.tensors = (packed,)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self.packed, bias)


class PlainGroupedGemm:
    """The GEMMs of rows sorted by expert with unquantized weights [experts, outputs, inputs]."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.tensors = (weights,)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return multiply_grouped(x, self.weights, ends)


def multiply_grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs], sorted by expert, times weights [experts, outputs, inputs] -> [rows,
    outputs]."""
    rows = [size * x.element_size() % 16 == 0 for size in weights.shape[1:]]
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and all(rows):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    rows_by_expert = x[: sum(sizes)].split(sizes)
    out = [F.linear(expert_rows, weight) for expert_rows, weight in zip(rows_by_expert, weights, strict=True)]
    return torch.cat([*out, x.new_zeros(len(x) - sum(sizes), weights.shape[1])])
