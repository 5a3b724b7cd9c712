"""GEMMs with unquantized weights: one matrix, or one for each expert.

Used by GEMM plugins and tied heads. Depends on no layer and no format.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
