"""Grouped products that multiply one expert after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from frame.core.interfaces.gemm_kernel import Gemm


class EachExpert:
    """Rows sorted by expert, one product after another."""

    def __init__(self, gemms: Sequence[Gemm]) -> None:
        self.gemms = gemms
        self.tensors = [tensor for product in gemms for tensor in product.tensors]

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = x[: sum(sizes)].split(sizes)
        found = [product(part) for part, product in zip(parts, self.gemms, strict=True) if len(part)]
        rest = len(x) - sum(sizes)
        if not found or rest:
            found.append(x.new_zeros(rest, self.gemms[0](x[:1]).shape[1]))
        return torch.cat(found)
