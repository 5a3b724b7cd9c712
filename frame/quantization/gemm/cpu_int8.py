"""Products with int8 weights on a CPU by PyTorch's packed kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from frame.core.interfaces.gemm_kernel import GemmKernel, GroupedProduct, Product
from frame.core.interfaces.weight_format import PackedWeight
from frame.quantization.gemm.each_expert import EachExpert

# PyTorch's int8 kernel reads half the bytes but uses no matrix instructions, so it is faster only
# for few rows. Xeon with AMX, 2048 x 2048, µs at 1, 4, 8, 16 rows: 630, 1540, 2580, 5240;
# dequantized to bfloat16: 5000 to 6000 for any number.
_KERNEL_ROWS = 8
_MULTIPLE = 32  # the int8 kernel reads past the end of rows of other lengths


class Int8CpuKernel(GemmKernel):
    """int8 weights with one scale per output."""

    def find_obstacle(self, weight: PackedWeight) -> str | None:
        if weight.codes.device.type != "cpu":
            return "the weight is not on a CPU"
        if weight.scheme.group != (1, 0) and weight.scheme.group != (1, weight.columns):
            return "it takes one scale per output"
        if weight.zeros is not None or weight.order is not None:
            return "it takes no zero points or order"
        return None

    def prepare(self, weight: PackedWeight) -> Product:
        return Int8Product(weight, self.context.dtype)

    def prepare_experts(self, weight: PackedWeight) -> GroupedProduct:
        return EachExpert([Int8Product(weight.expert(index), self.context.dtype) for index in range(len(weight.codes))])


class Int8Product:
    """`torch._weight_int8pack_mm` for few rows of bfloat16; else the codes as numbers of the
    model's dtype, with scales afterwards."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        assert weight.scales is not None
        self.codes, self.scales = weight.codes, weight.scales.flatten().to(dtype)
        self.tensors = (self.codes, self.scales)
        self._fits = self.codes.shape[1] % _MULTIPLE == 0 and self.codes.is_contiguous()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._fits and x.dtype == torch.bfloat16 and x.dim() == 2 and 0 < x.shape[0] <= _KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)  # noqa: SLF001
        else:
            out = F.linear(x, self.codes.to(x.dtype)) * self.scales
        return out if bias is None else out + bias
