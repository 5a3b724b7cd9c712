"""GEMMs with int4 weights on a CPU by PyTorch's packed kernel."""

from __future__ import annotations

from typing import ClassVar

import torch

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight, unpack_nibbles
from frame.quantization.gemm.each_expert import EachExpert

_GROUPS = (32, 64, 128, 256)  # inputs of a scale that the kernel takes
_OUTPUTS = 16  # the kernel's outputs are multiples of it


class Int4CpuKernel(GemmKernel):
    """int4 weights in groups of 32 to 256 inputs, in bfloat16."""

    minima: ClassVar[bool] = True

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        if weight.quantized.device.type not in ("cpu", "meta"):
            return "the weight is not on a CPU"
        if weight.scheme.group[0] != 1 or weight.scheme.group[1] not in _GROUPS:
            return f"it takes groups of {', '.join(map(str, _GROUPS))} inputs"
        if weight.columns % weight.scheme.group[1] or weight.outputs % _OUTPUTS:
            return f"its inputs are no multiple of the group, or its outputs of {_OUTPUTS}"
        return "it takes no order" if weight.order is not None else None

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return Int4Gemm(weight)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return EachExpert([Int4Gemm(weight.expert(index)) for index in range(len(weight.quantized))])

    def count_bytes(self, weight: CanonicalWeight) -> int:
        outputs = weight.quantized.shape[:-1].numel()
        return outputs * weight.columns // 2 + outputs * weight.columns // weight.scheme.group[1] * 4


class Int4Gemm:
    """`_weight_int4pack_mm_for_cpu`: (code - 8) * scale + zero, with the zero points or minima of
    the weight as numbers."""

    def __init__(self, weight: CanonicalWeight) -> None:
        assert weight.scales is not None
        quantized = unpack_nibbles(weight.quantized)[:, : weight.columns].to(torch.int32)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantized, 1)  # noqa: SLF001
        scales = weight.scales.float()
        zeros = scales.new_zeros(()).expand_as(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
        if weight.minima is not None:
            zeros = 8 * scales - weight.minima.float()
        self.scales = torch.stack((scales, zeros), -1).transpose(0, 1).contiguous().to(torch.bfloat16)  # [groups, outputs, 2]
        self.tensors = (self.packed, self.scales)
        self._group = weight.scheme.group[1]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, self._group, self.scales)  # noqa: SLF001
        out = out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias
