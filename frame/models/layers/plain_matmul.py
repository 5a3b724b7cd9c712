"""The GEMM with one unquantized weight: selects the fastest kernel for the number of rows.

Built when the weight has its final place (`process_weights_after_loading`); a call then only
looks at the number of rows. Depends on no layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from frame import kernels
from frame.kernels.linear.linear_plan import MAX_ROWS, WIDE

if TYPE_CHECKING:
    from collections.abc import Callable

    from frame.kernels.linear.linear_plan import Plan

_TYPES = (torch.bfloat16, torch.float16)
_FEWEST = 8  # rows of the smallest tile of all skinny kernels
_TESTED_ROWS = 1040  # by `keep_equal`; the fused kernel for many rows takes several tiles for them


class PlainMatmul:
    """x […, inputs] times `weight` [outputs, inputs], transposed, while the weight keeps its size
    and address.

    Few rows use a skinny GEMM kernel (`frame.kernels.linear.linear`). Other sizes, and code under
    torch.compile, use PyTorch; many rows of gate and up use a GEMM fused with their activation
    (`gated_prefill` or `gated_linear`) where that is faster.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._plans: tuple[Plan | None, ...] = ()
        self._gated_plans: tuple[Plan | None, ...] = ()
        self.multiply_many: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
        self._programs = 0  # programs of the fused gate-and-up kernel for many rows; 0 without it
        self._batches: tuple[int, ...] = ()  # smaller batch sizes for which it is used too
        self._is_compiled = False  # whether that kernel is compiled
        if kernels.can_use_triton(weight.device) and weight.dtype in _TYPES and _is_aligned(weight):
            from frame.kernels.linear.linear import skinny_linear  # imports Triton
            from frame.kernels.linear.linear_plan import choose_plans

            self._skinny_linear = skinny_linear
            outputs, inputs = weight.shape
            chip = kernels.get_shared_memory(weight.device), kernels.supports_tma_streaming(weight.device)
            self._plans = choose_plans(outputs, inputs, False, *chip)
            if outputs % 2 == 0:
                self._gated_plans = choose_plans(outputs, inputs, True, *chip)
                self._prepare_gated(weight)
            self._prepare_stream()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x […, inputs] -> […, outputs]."""
        out = self.multiply_few(x, weight, bias)
        return F.linear(x, weight, bias) if out is None else out

    def multiply_few(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """As a call; None where PyTorch's GEMM is as fast."""
        plan = _get_plan(self._plans, x)
        return None if plan is None else self._multiply_few(plan, x, weight, bias)

    def multiply_gated(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """SiLU(gate) * up, […, outputs // 2], where the weight's rows are gate and up; None where a
        separate activation is faster."""
        plan = _get_plan(self._gated_plans, x)
        if plan is not None:
            return self._multiply_few(plan, x, weight, bias, gated=True)
        if self._programs == 0 or bias is not None or x.dim() != 2 or torch.compiler.is_compiling():
            return None
        return self._multiply_gated_many(x, weight)

    def keep_equal(self, weight: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], *, gated: bool) -> None:
        """Use only kernels that give the bits of `multiply`, by a test with random rows. gated:
        those of gate and up."""
        plans = [plan if plan and _adds_in_order(plan) else None for plan in (self._gated_plans if gated else self._plans)]
        for rows in range(min(_FEWEST, len(plans) - 1) - 1, 0, -1):  # which a kernel of more rows pads
            plans[rows] = plans[rows] or plans[rows + 1]
        has_many = gated and self._programs > 0
        if not weight.any():  # on which all kernels agree
            plans, has_many = [], False
        if has_many or any(plans):
            generator = torch.Generator(weight.device).manual_seed(0)
            rows = _TESTED_ROWS if has_many else MAX_ROWS
            x = torch.randn(rows, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)
            expected = multiply(x)
            has_many = has_many and self._gated_module.can_use_tma(x, weight)
            has_many = has_many and self._has_bits(x, weight, expected)
            equal: dict[tuple[Plan, int], bool] = {}  # by plan and rows of the tile
            for rows, plan in enumerate(plans):
                if plan is None:
                    continue
                variant = plan, 1 << max(3, (rows - 1).bit_length())
                if variant not in equal:
                    some = [self._multiply_few(plan, x[:count], weight, None, gated) for count in (rows, min(variant[1], MAX_ROWS))]
                    equal[variant] = all(torch.equal(each, expected[: len(each)]) for each in some)
                plans[rows] = plan if equal[variant] else None
        self._programs = self._programs if has_many else 0
        self._plans, self._gated_plans = ((), tuple(plans)) if gated else (tuple(plans), ())

    def _has_bits(self, x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether a fused kernel for many rows gives these bits: the chosen one, or `gated_linear`,
        which is chosen then."""
        if torch.equal(self.multiply_many(x, weight, self._programs), expected):
            return True
        self.multiply_many, self._batches = self._gated_module.gated_linear, ()
        return torch.equal(self.multiply_many(x, weight, self._programs), expected)

    def _prepare_stream(self) -> None:
        if any(plan is not None and plan.kernel == "stream" for plan in (*self._plans, *self._gated_plans)):
            from frame.kernels.linear.linear_stream import stream_linear

            self._stream_linear = stream_linear

    def _prepare_gated(self, weight: torch.Tensor) -> None:
        from frame.kernels.launch import count_tma_processors
        from frame.kernels.linear import gated_linear

        self._gated_module, self._programs = gated_linear, count_tma_processors(weight.device)
        self.multiply_many = gated_linear.gated_linear
        if kernels.supports_tma_streaming(weight.device):
            from frame.kernels.linear import gated_prefill

            if gated_prefill.can_tile(len(weight) // 2, weight.shape[1]):
                self.multiply_many, self._batches = gated_prefill.gated_prefill, gated_prefill.BATCHES

    def _multiply_few(
        self, plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> torch.Tensor:
        if plan.kernel != "stream":
            return self._skinny_linear(x, weight, bias, plan, gated)
        if not _is_aligned(x):
            x = x.clone(memory_format=torch.contiguous_format)
        return self._stream_linear(x, weight, bias, plan, gated)

    def _multiply_gated_many(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        if not self._gated_module.can_use_tma(x, weight):
            return None
        if not self._is_compiled:  # compiled with the first tokens, not when a large batch first comes
            self._is_compiled = True
            self.multiply_many(x[:1], weight, self._programs)
        if not self._gated_module.is_faster(len(x), len(weight) // 2, self._programs, self._batches):
            return None
        return self.multiply_many(x, weight, self._programs)


def _adds_in_order(plan: Plan) -> bool:
    """Whether a kernel adds the products of all inputs in order, as libraries do without split-K;
    others could pass a test of few outputs by chance."""
    return plan.kernel == "stream" or (plan.kernel == "tile" and plan.outputs >= WIDE)


def _is_aligned(weight: torch.Tensor) -> bool:
    """Whether each row is contiguous and starts at a multiple of 16 bytes."""
    return weight.stride(1) == 1 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0


def _get_plan(plans: tuple[Plan | None, ...], x: torch.Tensor) -> Plan | None:
    if not plans or x.dim() != 2 or len(x) >= len(plans) or x.stride(1) != 1 or torch.compiler.is_compiling():
        return None
    return plans[len(x)]
