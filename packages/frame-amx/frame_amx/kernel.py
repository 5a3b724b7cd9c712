"""The GEMM kernel `amx`: products of bfloat16 rows with bfloat16, int8 and int4 weights by the
library `_products`, which reads weights in canonical form.

Loaded by its record. Must not know checkpoints and layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from frame.core.interfaces.gemm_kernel import GemmKernel, GroupedProduct
from frame_amx.library import load_library
from frame_amx.operations import AmxOperations

if TYPE_CHECKING:
    import ctypes

    from pydantic import BaseModel

    from frame.core.interfaces.rank_context import RankContext
    from frame.core.interfaces.weight_format import PackedWeight

_KINDS = {"plain": 0, "int8": 1, "int4": 2}
_OUTPUTS, _INPUTS = 32, 32  # sizes are multiples of them
_MOST_INPUTS = 1 << 17  # of which an int32 holds the sum
_PLAIN_ROWS = 128  # of plain weights; for more, PyTorch's product is as fast


class AmxKernel(GemmKernel):
    """Plain weights, int8 with one scale per output, and int4 in groups."""

    in_place: ClassVar[bool] = True

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._library = load_library()
        if self._library is not None and context.device.type == "cpu" and context.dtype == torch.bfloat16:
            self.row_operations = AmxOperations(self._library)

    def find_obstacle(self, weight: PackedWeight) -> str | None:
        if self._library is None:
            return "this CPU or operating system has no AMX tiles with bfloat16"
        if weight.codes.device.type not in ("cpu", "meta") or self.context.dtype != torch.bfloat16:
            return "it takes bfloat16 activations on a CPU"
        if weight.outputs % _OUTPUTS or weight.columns % _INPUTS or weight.columns > _MOST_INPUTS:
            return f"it takes multiples of {_OUTPUTS} outputs, and of {_INPUTS} inputs up to {_MOST_INPUTS}"
        if weight.order is not None or weight.outer is not None:
            return "it takes no order and no second scale"
        if weight.scheme.codes == "plain":
            return None
        rows, width = weight.scheme.group[0], weight.scheme.group[1] or weight.columns
        if weight.scheme.codes == "int8" and (rows != 1 or width != weight.columns or weight.zeros is not None):
            return "int8 has one scale per output and no zero points"
        if rows != 1 or width % _INPUTS or weight.columns % width:
            return f"it takes groups of one output and a multiple of {_INPUTS} inputs that divides all inputs"
        return None

    def prepare(self, weight: PackedWeight) -> AmxProduct:
        assert self._library is not None
        return AmxProduct(self._library, weight)

    def prepare_experts(self, weight: PackedWeight) -> GroupedProduct:
        return EachExpert([self.prepare(weight.expert(index)) for index in range(len(weight.codes))])

    def count_bytes(self, weight: PackedWeight) -> int:
        scales = weight.scales
        return super().count_bytes(weight) + (0 if scales is None else scales.numel() * (4 - scales.itemsize))  # kept in float32


class AmxProduct:
    """The product with one weight in canonical form. It keeps the weight's own codes."""

    def __init__(self, library: ctypes.CDLL, weight: PackedWeight) -> None:
        self._multiply = library.frame_amx_multiply
        self.codes = weight.codes.contiguous()
        self._kind = _KINDS[weight.scheme.codes]
        self._sizes = (weight.outputs, weight.columns, weight.scheme.group[1] or weight.columns)
        self._scales = None if weight.scales is None else weight.scales.float().contiguous()
        self._zeros = None if weight.zeros is None else weight.zeros.to(torch.int8).contiguous()
        self.tensors = tuple(tensor for tensor in (self.codes, self._scales, self._zeros) if tensor is not None)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in (self.codes, self._scales, self._zeros)]
        self._weight = (self._kind, *self._sizes, *addresses)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._run(x, self._sizes[0], 0) if self._takes(x) else F.linear(x, self.codes)
        return out if bias is None else out.add_(bias)

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        if bias is not None or not self._takes(x):
            return None
        return self._run(x, self._sizes[0] // 2, 1)

    def _takes(self, x: torch.Tensor) -> bool:
        return self._kind != 0 or x.numel() <= _PLAIN_ROWS * self._sizes[1]

    def _run(self, x: torch.Tensor, outputs: int, gated: int) -> torch.Tensor:
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        rows = flat.shape[0]
        out = x.new_empty(rows, outputs)
        if rows:
            threads = torch.get_num_threads()
            self._multiply(*self._weight, flat.data_ptr(), rows, flat.stride(0), out.data_ptr(), gated, threads)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)


class EachExpert:
    """The products of rows sorted by expert, one expert after another."""

    def __init__(self, experts: list[AmxProduct]) -> None:
        self.experts = experts
        self.tensors = tuple(tensor for expert in experts for tensor in expert.tensors)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(len(x), self.experts[0].codes.shape[0])
        first = 0
        for expert, last in zip(self.experts, ends.tolist(), strict=True):
            if last > first:
                out[first:last] = expert(x[first:last])
            first = last
        return out
