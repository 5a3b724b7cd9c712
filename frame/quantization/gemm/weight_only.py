"""GEMMs with 4-bit and 8-bit weights by the Triton kernels of
`frame.kernels.linear.weight_only`. Activations keep their dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels.nvidia import count_multiprocessors

if TYPE_CHECKING:
    from frame.quantization.gemm.mixture import Mixture

_PROCESSORS = 132  # assumed for the interpreter
_COUNTERS = 1 << 16  # tiles whose split-K sums are counted


class WeightOnlyKernel(GemmKernel):
    """Dequantizes weights in registers; for many rows, or with minima, the whole weight
    once."""

    minima: ClassVar[bool] = True

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        from frame.kernels.linear.weight_only import find_obstacle

        device = weight.quantized.device
        if device.type != "meta" and not kernels.can_use_triton(device):
            return "the device does not run Triton"
        floats = [weight.quantized.dtype, weight.scales.dtype if weight.scales is not None else None]
        if torch.float8_e4m3fn in floats and not kernels.supports_fp8(device):
            return "the device does not convert e4m3"
        return find_obstacle(weight)

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return WeightOnlyGemm(weight)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return WeightOnlyGroupedGemm(weight, self.context.limits.max_tokens_per_step)


class WeightOnlyGemm:
    """x times one weight, while its tensors keep their sizes and addresses."""

    def __init__(self, weight: CanonicalWeight) -> None:
        from frame.kernels.linear import weight_only, weight_rows

        self.weight = weight
        self.tensors = list(weight.tensors.values())
        self._module, self._few, self._processors = weight_only, weight_rows, _count_processors(weight.quantized.device)
        self._counter = torch.zeros(_COUNTERS, dtype=torch.int32, device=weight.quantized.device)

    def takes_few(self, x: torch.Tensor) -> bool:
        """Whether the kernel for few rows multiplies x."""
        return 0 < x.numel() <= x.shape[-1] * self._few.count_max_rows(self.weight, x.dtype)

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        if not self.takes_few(x):
            return None
        from frame.kernels.moe.grouped_gemm import SILU

        flat = _flatten(x)
        out = self._few.multiply_rows(flat, self.weight, bias, self._few.choose_rows_plan(self.weight), SILU)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = _flatten(x)
        rows = len(flat)
        if self.weight.order is not None:
            flat = flat.index_select(1, self.weight.order)
        if self.takes_few(flat):
            out = self._few.multiply_rows(flat, self.weight, bias, self._few.choose_rows_plan(self.weight))
        elif rows > self._module.MAX_FUSED_ROWS or (rows and self.weight.minima is not None):
            out = F.linear(flat, self._module.dequantize(self.weight, x.dtype), bias)
        else:
            plan = self._module.choose_plan(max(1, rows), self.weight, self._processors)
            out = self._module.multiply(flat, self.weight, bias, plan, self._counter)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


class WeightOnlyGroupedGemm:
    """Rows sorted by expert times the weights of their experts. `maximum`: tokens of a step."""

    def __init__(self, weight: CanonicalWeight, maximum: int = 0) -> None:
        from frame.kernels.linear import weight_only

        self.weight, self._maximum = weight, maximum
        self._mixture: Mixture | None = None
        self.tensors = list(weight.tensors.values())
        self._module, self._processors = weight_only, _count_processors(weight.quantized.device)
        self._counter = torch.zeros(_COUNTERS, dtype=torch.int32, device=weight.quantized.device)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        each = max(1, len(x) // len(self.weight.quantized))  # rows of an expert, on average
        plan = self._module.choose_grouped_plan(each, self.weight)
        if self.weight.order is None:
            return self._module.multiply(x, self.weight, None, plan, self._counter, ends)
        owners = torch.bucketize(torch.arange(len(x), device=x.device), ends, right=True).clamp_max_(len(ends) - 1)
        ordered = x.gather(1, self.weight.order.long().index_select(0, owners))
        return self._module.multiply(ordered, self.weight, None, plan, self._counter, ends)

    def mix(self, down: GroupedGemm, tokens: DispatchOutput, experts: nn.Module, parts: bool) -> torch.Tensor | None:
        """The whole experts; the kernels read tokens where they are."""
        if not isinstance(down, WeightOnlyGroupedGemm) or self.weight.order is not None or down.weight.order is not None:
            return None
        from frame.quantization.gemm.mixture import Mixture, sum_pairs

        if self._mixture is None:
            self._mixture = Mixture(self.weight, down.weight, self._maximum)
        rows = self._mixture(tokens.x, tokens.ids, tokens.weights, experts)
        return None if rows is None else sum_pairs(rows, len(tokens.ids), parts)


def _flatten(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


def _count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return count_multiprocessors(device)
