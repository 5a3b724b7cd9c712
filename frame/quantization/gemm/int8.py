"""GEMMs with int8 weights whose activations are quantized to int8 too, summed in int32."""

from __future__ import annotations

from dataclasses import replace

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.quantization.gemm.fp8 import W8A8Gemm
from frame.quantization.gemm.w8a8_matmul import find_obstacle


class Int8Kernel(GemmKernel):
    """Weights with one scale per output, of checkpoints made for quantized activations."""

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        if not weight.quantizes_inputs:
            return "the checkpoint does not quantize activations"
        if weight.quantized.dim() > 2:
            return "it has no products of experts"
        if weight.zeros is not None or weight.order is not None or weight.outer is not None:
            return "it takes no zero points, order or outer scales"
        if weight.scheme.group not in ((1, 0), (1, weight.columns)):
            return "it takes one scale per output"
        return find_obstacle(weight.quantized, (1, 0))

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        assert weight.scales is not None
        return W8A8Gemm(replace(weight, scheme=WeightScheme("int8"), scales=weight.scales.float()))

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        raise NotImplementedError("find_obstacle refuses experts")
