"""Grouped GEMMs that multiply one expert after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from frame.core.interfaces.gemm_kernel import Gemm


class EachExpert:
    """Rows sorted by expert, one GEMM after another."""

    def __init__(self, gemms: Sequence[Gemm]) -> None:
        self.gemms = gemms
        self.tensors = [tensor for gemm in gemms for tensor in gemm.tensors]

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        rows_by_expert = x[: sum(sizes)].split(sizes)
        results = [gemm(rows) for rows, gemm in zip(rows_by_expert, self.gemms, strict=True) if len(rows)]
        rest = len(x) - sum(sizes)
        if not results or rest:
            results.append(x.new_zeros(rest, self.gemms[0](x[:1]).shape[1]))
        return torch.cat(results)
