"""GEMMs with e4m3 weights whose activations are quantized to e4m3 too."""

from __future__ import annotations

import torch

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.quantization.gemm.w8a8_matmul import W8A8Matmul, find_obstacle


class Fp8Kernel(GemmKernel):
    """Weights with one scale per output or per block of 128 x 128."""

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        if weight.quantized.dim() > 2:
            return "experts are multiplied by the MoE runner"
        if weight.zeros is not None or weight.order is not None or weight.outer is not None:
            return "it takes no zero points, order or outer scales"
        return find_obstacle(weight.quantized, weight.scheme.group)

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return W8A8Gemm(weight)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        raise NotImplementedError("experts are multiplied by the MoE runner")


class W8A8Gemm:
    """x times one weight, while its tensors keep their sizes and addresses."""

    def __init__(self, weight: CanonicalWeight) -> None:
        assert weight.scales is not None
        self.quantized = weight.quantized
        self._matmul = W8A8Matmul(weight.quantized, weight.scales, weight.scheme.group, weight.input_scale)
        self.tensors = self._matmul.list_tensors(weight.quantized)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._matmul(x, self.quantized, bias)

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """SiLU(first half of the outputs) * second half; None where a separate activation is
        faster."""
        return self._matmul.multiply_gated(x, self.quantized, bias)
