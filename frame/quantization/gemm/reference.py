"""The reference of all kernels: dequantize, then multiply."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from frame.core.errors import ConfigurationError
from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels.linear.invariant import InvariantRows
from frame.models.layers.weights.plain_gemm import multiply_grouped


class ReferenceKernel(GemmKernel):
    """Dequantizes the weight in every GEMM, so it takes any weight, slowly."""

    minima: ClassVar[bool] = True

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return None

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return InvariantReferenceGemm(weight, self.context.dtype) if self.context.deterministic else ReferenceGemm(weight)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        if self.context.deterministic:
            sentence = "experts are dequantized after loading under execution.deterministic: leave model.gemm_kernel open"
            raise ConfigurationError(f"gemm kernel 'torch' multiplies no experts: {sentence}.")
        return ReferenceGroupedGemm(weight)


class ReferenceGemm:
    """x times the dequantized weight."""

    def __init__(self, weight: CanonicalWeight) -> None:
        self.weight = weight
        self.tensors = list(weight.tensors.values())

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight.dequantize(x.dtype), bias)


class InvariantReferenceGemm(ReferenceGemm):
    """`ReferenceGemm` under `RankContext.deterministic`, with the bits of `InvariantMatmul` and the
    dequantized weight."""

    def __init__(self, weight: CanonicalWeight, dtype: torch.dtype) -> None:
        super().__init__(weight)
        dense = weight.dequantize(dtype)
        self._rows = InvariantRows(super().__call__, dense[:1], "linear", *dense.shape, *dense.stride())

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._rows(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias


class ReferenceGroupedGemm:
    """Rows sorted by expert times the dequantized weights."""

    def __init__(self, weight: CanonicalWeight) -> None:
        self.weight = weight
        self.tensors = list(weight.tensors.values())

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return multiply_grouped(x, self.weight.dequantize(x.dtype), ends)
