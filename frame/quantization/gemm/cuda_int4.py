"""GEMMs with int4 weights by the CUDA kernels of `frame.kernels.linear.blocked_int4`.
Activations keep their dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels import cuda_source
from frame.kernels.linear import blocked_int4


class CudaInt4Kernel(GemmKernel):
    """Multiplies int4 values as it reads them; for very many rows, the dequantized
    weight."""

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return cuda_source.find_hopper_obstacle(weight.quantized.device) or blocked_int4.find_obstacle(weight, self.context.dtype)

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return CudaInt4Gemm(weight)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        raise NotImplementedError("it multiplies no experts")

    def count_bytes(self, weight: CanonicalWeight) -> int:
        order = 0 if weight.order is None else weight.order.nbytes
        return order + blocked_int4.count_bytes(weight.outputs, weight.columns, weight.scheme.group[1])


class CudaInt4Gemm:
    """x times one weight."""

    def __init__(self, weight: CanonicalWeight) -> None:
        self._kernels, self._order = blocked_int4.BlockedGemms(blocked_int4.pack_weight(weight)), weight.order

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self._kernels.tensors, *([] if self._order is None else [self._order])]

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        flat = self._flatten(x)
        if not 0 < len(flat) <= blocked_int4.MAX_FEW_ROWS or self._kernels.weight.outputs % (2 * blocked_int4.TILE):
            return None
        return _restore(self._kernels.multiply_few(flat, bias, is_gated=True), x)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = self._flatten(x)
        rows = len(flat)
        if not rows:
            return x.new_empty(*x.shape[:-1], self._kernels.weight.outputs)
        if rows <= blocked_int4.MAX_FEW_ROWS:
            out = self._kernels.multiply_few(flat, bias)
        elif rows <= blocked_int4.MAX_ROWS:
            out = self._kernels.multiply(flat, bias)
        else:
            out = F.linear(flat, self._kernels.dequantize(), bias)
        return _restore(out, x)

    def _flatten(self, x: torch.Tensor) -> torch.Tensor:
        flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        return flat if self._order is None else flat.index_select(1, self._order)


def _restore(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])
