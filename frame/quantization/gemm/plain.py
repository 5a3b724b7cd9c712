"""Products with unquantized weights."""

from __future__ import annotations

from frame.core.interfaces.gemm_kernel import GemmKernel, GroupedProduct, Product
from frame.core.interfaces.weight_format import PackedWeight
from frame.models.layers.packed import can_pack, pack_weight
from frame.models.layers.weights.plain_product import PackedProduct, PlainGroupedProduct, PlainProduct


class PlainKernel(GemmKernel):
    """Multiplies weights in the model's dtype."""

    def find_obstacle(self, weight: PackedWeight) -> str | None:
        return None if weight.scheme.codes == "plain" else "the weight is quantized"

    def prepare(self, weight: PackedWeight) -> Product:
        if can_pack(weight.codes):
            return PackedProduct(pack_weight(weight.codes))
        return PlainProduct(weight.codes)

    def prepare_experts(self, weight: PackedWeight) -> GroupedProduct:
        return PlainGroupedProduct(weight.codes)
