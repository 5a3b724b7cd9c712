"""GEMMs with unquantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels.linear.invariant import limit_workspaces
from frame.models.layers.packed import can_pack, pack_weight
from frame.models.layers.weights.plain_gemm import InvariantGemm, PackedGemm, PlainGemm, PlainGroupedGemm

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.rank_context import RankContext


class PlainKernel(GemmKernel):
    """Multiplies weights in the model's dtype."""

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        if context.deterministic:
            limit_workspaces()

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return None if weight.scheme.quant_type == "plain" else "the weight is quantized"

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        if self.context.deterministic:
            return InvariantGemm(weight.quantized)
        if can_pack(weight.quantized):
            return PackedGemm(pack_weight(weight.quantized))
        return PlainGemm(weight.quantized)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return PlainGroupedGemm(weight.quantized)
