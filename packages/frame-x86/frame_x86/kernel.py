"""The GEMM kernels `amx`, `avx512` and `avx2`: products of bfloat16 rows with bfloat16, int8 and
int4 weights by the compiled libraries.

Loaded by their records. Must not know checkpoints and layers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from frame.core.interfaces.gemm_kernel import GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import unpack_nibbles
from frame_x86 import NEEDS, find_level
from frame_x86.library import load_library, request_tiles
from frame_x86.operations import X86Operations

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

    from frame.core.interfaces.rank_context import RankContext
    from frame.core.interfaces.weight_format import CanonicalWeight

_KINDS = {"plain": 0, "int8": 1, "int4": 2}
_OUTPUTS, _INPUTS = 32, 32  # sizes are multiples of them
_MAX_INPUTS = 1 << 17  # of which an int32 holds the sum
_MAX_GROUP = 1 << 13  # inputs of an int4 scale, of which an int32 holds the sum with both digits
_TILE_ROWS, _FEW_ROWS = 128, 64  # of plain weights; for more, PyTorch's product by BF16 instructions is as fast
_PANEL = 16  # outputs


class X86Kernel(GemmKernel):
    """Plain weights, int8 with one scale per output, and int4 in groups."""

    in_place: ClassVar[bool] = True
    name: ClassVar[str]  # of the plugin

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._library = load_library(self.name)
        if self._library is not None and context.device.type == "cpu" and context.dtype == torch.bfloat16:
            self.row_operations = X86Operations(self._library)

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        if self._library is None:
            return f"this CPU has no {NEEDS[self.name]}"
        if weight.quantized.device.type not in ("cpu", "meta") or self.context.dtype != torch.bfloat16:
            return "it takes bfloat16 activations on a CPU"
        if weight.outputs % _OUTPUTS or weight.columns % _INPUTS or weight.columns > _MAX_INPUTS:
            return f"it takes multiples of {_OUTPUTS} outputs, and of {_INPUTS} inputs up to {_MAX_INPUTS}"
        if weight.order is not None or weight.outer is not None:
            return "it takes no order and no second scale"
        if weight.scheme.quant_type == "plain":
            return None
        rows, width = weight.scheme.group[0], weight.scheme.group[1] or weight.columns
        if weight.scheme.quant_type == "int8" and (rows != 1 or width != weight.columns or weight.zeros is not None):
            return "int8 has one scale per output and no zero points"
        if rows != 1 or width % _INPUTS or weight.columns % width:
            return f"it takes groups of one output and a multiple of {_INPUTS} inputs that divides all inputs"
        return None

    @abstractmethod
    def prepare(self, weight: CanonicalWeight) -> X86Product: ...

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return EachExpert([self.prepare(weight.expert(index)) for index in range(len(weight.quantized))])

    def count_bytes(self, weight: CanonicalWeight) -> int:
        scales = weight.scales
        return super().count_bytes(weight) + (0 if scales is None else scales.numel() * (4 - scales.itemsize))  # kept in float32


class AmxKernel(X86Kernel):
    """By AMX tiles, from the quantized values of the weight itself."""

    name: ClassVar[str] = "amx"

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._has_tiles = self._library is not None and request_tiles(self._library)

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        if self._library is not None and not self._has_tiles:
            return "this CPU or operating system has no AMX tiles with bfloat16"
        return super().find_obstacle(weight)

    def prepare(self, weight: CanonicalWeight) -> X86Product:
        assert self._library is not None
        return X86Product(self._library.frame_x86_multiply, weight, (weight.quantized, weight.scales, weight.zeros), _TILE_ROWS)


class Avx512Kernel(X86Kernel):
    """By VNNI, from panels of quantized weights, which are copies; plain weights are not copied."""

    name: ClassVar[str] = "avx512"
    adds_128: ClassVar[bool] = True  # to int8 values, which the instruction takes unsigned

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        if (obstacle := super().find_obstacle(weight)) is not None:
            return obstacle
        if weight.scheme.quant_type == "int4" and (weight.scheme.group[1] or weight.columns) > _MAX_GROUP:
            return f"it takes groups of up to {_MAX_GROUP} inputs"
        return "it multiplies quantized inputs slower than the kernel without this package" if weight.quantizes_inputs else None

    def prepare(self, weight: CanonicalWeight) -> X86Product:
        assert self._library is not None
        if weight.scheme.quant_type == "plain":
            max_rows = _FEW_ROWS if find_level(self.name) == "avx512_bf16" else None
            return X86Product(self._library.frame_x86_multiply_few, weight, (weight.quantized, None, None), max_rows)
        return X86Product(self._library.frame_x86_multiply_panels, weight, pack_panels(weight, self.adds_128))


class Avx2Kernel(Avx512Kernel):
    """By AVX2, in the same form."""

    name: ClassVar[str] = "avx2"
    adds_128: ClassVar[bool] = False


def pack_panels(weight: CanonicalWeight, adds_128: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(quantized values, scales, zero points) in panels of 16 outputs.

    Quantized values uint8 [outputs / 16, inputs / 4 or 8, 16, 4]: int8 with 128 added (`adds_128`);
    int4 in pairs, inputs 8 n to 8 n + 3 in the low nibbles and the next four in the high ones.
    Scales and zero points [outputs / 16, groups, 16].
    """

    def split(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()

    if weight.scheme.quant_type == "int8":
        quantized = (weight.quantized.view(torch.uint8) ^ (128 if adds_128 else 0)).unflatten(1, (-1, 4))
    else:
        low, high = unpack_nibbles(weight.quantized)[:, : weight.columns].unflatten(1, (-1, 2, 4)).unbind(2)
        quantized = low | high << 4
    assert weight.scales is not None
    return split(quantized), split(weight.scales), None if weight.zeros is None else split(weight.zeros)


class X86Product:
    """The product with one weight, by `multiply` of the library. It keeps the `tensors`: quantized
    values, scales and zero points in the order that the function takes. Of plain weights the
    function takes up to `max_rows`, if it is not None, and PyTorch multiplies more."""

    def __init__(
        self,
        multiply: Callable[..., None],
        weight: CanonicalWeight,
        tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        max_rows: int | None = None,
    ) -> None:
        quantized, scales, zeros = tensors
        self._multiply = multiply
        self._max_rows = max_rows if weight.scheme.quant_type == "plain" else None
        self.outputs, self._inputs = weight.outputs, weight.columns
        self.quantized = quantized.contiguous()
        self._scales = None if scales is None else scales.float().contiguous()
        self._zeros = None if zeros is None else zeros.to(torch.int8).contiguous()
        self.tensors = tuple(tensor for tensor in (self.quantized, self._scales, self._zeros) if tensor is not None)
        sizes = (self.outputs, self._inputs, weight.scheme.group[1] or self._inputs)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in (self.quantized, self._scales, self._zeros)]
        self._weight = (_KINDS[weight.scheme.quant_type], *sizes, *addresses)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._run(x, self.outputs, 0) if self._takes(x) else F.linear(x, self.quantized)
        return out if bias is None else out.add_(bias)

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        if bias is not None or not self._takes(x):
            return None
        return self._run(x, self.outputs // 2, 1)

    def _takes(self, x: torch.Tensor) -> bool:
        return self._max_rows is None or x.numel() <= self._max_rows * self._inputs

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

    def __init__(self, experts: list[X86Product]) -> None:
        self.experts = experts
        self.tensors = tuple(tensor for expert in experts for tensor in expert.tensors)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(len(x), self.experts[0].outputs)
        first = 0
        for expert, last in zip(self.experts, ends.tolist(), strict=True):
            if last > first:
                out[first:last] = expert(x[first:last])
            first = last
        return out
