"""GEMMs with weights that are dequantized after loading."""

from __future__ import annotations

from typing import ClassVar

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.models.layers.packed import can_pack, pack_weight
from frame.models.layers.weights.plain_gemm import InvariantGemm, PackedGemm, PlainGemm, PlainGroupedGemm


class UnpackedKernel(GemmKernel):
    """The numbers of the checkpoint at the speed and in the memory of unquantized weights."""

    unpacks: ClassVar[bool] = True
    minima: ClassVar[bool] = True

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return None

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        dense = weight.dequantize(self.context.dtype)
        if self.context.deterministic:
            return InvariantGemm(dense)
        return PackedGemm(pack_weight(dense)) if can_pack(dense) else PlainGemm(dense)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return PlainGroupedGemm(weight.dequantize(self.context.dtype))

    def count_bytes(self, weight: CanonicalWeight) -> int:
        return weight.quantized.shape[:-1].numel() * weight.inputs * self.context.dtype.itemsize
