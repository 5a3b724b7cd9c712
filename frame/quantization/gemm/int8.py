"""GEMMs with int8 weights whose activations are rounded to int8 too, summed in int32."""

from __future__ import annotations

from dataclasses import replace

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import PackedWeight, WeightScheme
from frame.quantization.gemm.fp8 import RoundedGemm
from frame.quantization.gemm.rounded_matmul import find_obstacle


class Int8Kernel(GemmKernel):
    """Weights with one scale per output, of checkpoints made for rounded activations."""

    def find_obstacle(self, weight: PackedWeight) -> str | None:
        if not weight.rounds_inputs:
            return "the checkpoint does not round activations"
        if weight.quantized.dim() > 2:
            return "it has no products of experts"
        if weight.zeros is not None or weight.order is not None or weight.outer is not None:
            return "it takes no zero points, order or outer scales"
        if weight.scheme.group not in ((1, 0), (1, weight.columns)):
            return "it takes one scale per output"
        return find_obstacle(weight.quantized, (1, 0))

    def prepare(self, weight: PackedWeight) -> Gemm:
        assert weight.scales is not None
        return RoundedGemm(replace(weight, scheme=WeightScheme("int8"), scales=weight.scales.float()))

    def prepare_experts(self, weight: PackedWeight) -> GroupedGemm:
        raise NotImplementedError("find_obstacle refuses experts")
