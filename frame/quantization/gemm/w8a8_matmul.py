"""The GEMM with one e4m3 or int8 weight: selects the fastest kernel for the number of rows.

Activations are quantized to the weight's type: per token for weights with one scale per output, or
by the checkpoint's static scale; per token and 128 inputs for block scales. Few rows use a skinny
GEMM kernel, others PyTorch (cuBLAS). Depends on no layer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from frame import kernels
from frame.kernels.linear.linear_plan import Plan as StreamPlan
from frame.kernels.nvidia import get_compute_capability

if TYPE_CHECKING:
    from frame.kernels.linear.fp8_linear import Plan

BLOCK = 128  # outputs and inputs of block scales
_MULTIPLE = 16  # both sizes must be multiples of it for PyTorch's fp8 matmuls
# below these sizes PyTorch's scaled GEMM leaves most of the device idle, and scaling separately
# is faster (docs/performance.md)
_FEW_OUTPUTS, _SOME_ROWS = 8192, 256


class W8A8Matmul:
    """x […, inputs] times a weight [outputs, inputs], transposed, while the weight and its scales
    keep their sizes and addresses.

    `scales` float32 [outputs, 1], or [outputs / 128, inputs / 128]; `block`: (outputs, inputs) of
    one scale, 0 for all inputs. `input_scale` float32: of every activation; of several, the largest
    counts. None: a scale for each token.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], input_scale: torch.Tensor | None = None) -> None:
        from frame.kernels.linear import fp8_linear, fp8_quantize

        outputs, inputs = weight.shape
        device = weight.device
        self._skinny_linear, self._max_few_rows = fp8_linear.skinny_fp8_linear, fp8_linear.MAX_ROWS
        each, room = range(self._max_few_rows + 1), kernels.get_shared_memory(device)
        rows_of_scale, columns = block
        sizes = (outputs, inputs, columns)
        plans = [fp8_linear.choose_plan(max(1, rows), *sizes).fit_shared_memory(room) for rows in each]
        gated = [fp8_linear.choose_gated_plan(max(1, rows), *sizes).fit_shared_memory(room, 2) for rows in each]
        self._plans: tuple[list[Plan | StreamPlan], ...] = ([*plans], [*gated])  # of plain and gated GEMMs, by rows
        if weight.dtype == fp8_quantize.FP8 and not columns and kernels.supports_tma_streaming(device):
            self._prepare_streams(outputs, inputs)
        self._can_gate = outputs % (2 * rows_of_scale) == 0
        self._counter = torch.zeros(-(-outputs // min(plan.outputs for plan in plans)), dtype=torch.int32, device=device)
        self.input_scale = None if input_scale is None or columns else input_scale.amax().reshape(1)
        by_rows = partial(fp8_quantize.quantize_rows, dtype=weight.dtype, static=self.input_scale)
        self._quantize = fp8_quantize.quantize_groups if columns else by_rows
        self._rescale = fp8_quantize.rescale
        self._block = block
        # rows padded to a multiple of four scales, which cuBLAS requires
        self.scales = F.pad(scales, (0, -scales.shape[1] % 4)) if columns else scales.flatten()
        self._one = torch.ones((), device=device)
        self._pdl = kernels.supports_pdl(device)
        self._has_large_gemm = device.type == "cuda" and (
            # cuBLAS has block-scaled GEMMs for 9.0 only
            not columns or get_compute_capability(device) == (9, 0)
        )

    def _prepare_streams(self, outputs: int, inputs: int) -> None:
        from frame.kernels.linear.linear_plan import choose_float8_stream
        from frame.kernels.linear.linear_stream import stream_linear

        self._stream_linear = stream_linear
        for is_gated, plans in enumerate(self._plans):
            for rows in range(1, len(plans)):
                plans[rows] = choose_float8_stream(rows, outputs, inputs, bool(is_gated)) or plans[rows]

    def list_tensors(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """What the GEMM with `weight` reads."""
        return [weight, self.scales, *([] if self.input_scale is None else [self.input_scale])]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        rows = flat.shape[0]
        if 0 < rows <= self._max_few_rows:
            out = self._multiply_few(flat, weight, bias)
        else:
            out = self._multiply_large(flat, weight) if rows else flat.new_empty(0, len(weight))
            if bias is not None:
                out += bias
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    def multiply_gated(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """SiLU(first half of the outputs) * second half, […, outputs / 2]; None for more rows than
        the skinny kernel takes."""
        flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        rows = flat.shape[0]
        if not (0 < rows <= self._max_few_rows and self._can_gate):
            return None
        out = self._multiply_few(flat, weight, bias, gated=True)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    def _multiply_few(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False) -> torch.Tensor:
        quantized, by_row = self._quantize(x, self._pdl)
        plan = self._plans[gated][len(x)]
        if isinstance(plan, StreamPlan):
            return self._stream_linear(quantized, weight, bias, plan, gated, (by_row, self.scales), x.dtype)
        return self._skinny_linear(
            quantized, by_row, weight, self.scales, self._block, bias, plan, self._counter,
            rows=len(x), dtype=x.dtype, gated=gated, pdl=self._pdl,
        )  # fmt: skip

    def _multiply_large(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == torch.int8:
            quantized, by_row = self._quantize(x, self._pdl)
            sums = torch._int_mm(quantized, weight.t())  # noqa: SLF001
            return self._rescale(sums, by_row, self.scales, self._pdl, x.dtype)
        if not self._has_large_gemm:
            scales = self.scales.unsqueeze(-1)
            if self._block[1]:
                scales = self.scales.repeat_interleave(BLOCK, 0)[: len(weight)].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
            return F.linear(x, weight.float().mul_(scales).to(x.dtype))
        quantized, by_row = self._quantize(x, self._pdl)
        if self._block[1]:
            kinds = F.ScalingType  # type: ignore[attr-defined]
            scales_of_blocks = (kinds.BlockWise1x128, self.scales.t(), kinds.BlockWise128x128)
            return F.scaled_mm(quantized, weight.t(), by_row, *scales_of_blocks, output_dtype=x.dtype)[: len(x)]  # type: ignore[attr-defined, no-any-return]
        # whose range holds the unscaled sums
        if len(x) <= _SOME_ROWS and len(weight) <= _FEW_OUTPUTS and x.dtype == torch.bfloat16:
            out = torch._scaled_mm(quantized, weight.t(), self._one, self._one, out_dtype=x.dtype, use_fast_accum=True)  # noqa: SLF001
            return self._rescale(out, by_row, self.scales, self._pdl)
        by_output = self.scales[None]
        return torch._scaled_mm(quantized, weight.t(), by_row, by_output, out_dtype=x.dtype, use_fast_accum=True)  # noqa: SLF001


def find_obstacle(weight: torch.Tensor, block: tuple[int, int]) -> str | None:
    """Why no kernel multiplies this weight on its device; None: one does."""
    device = weight.device
    if device.type != "meta" and not (kernels.can_use_triton(device) and (weight.dtype == torch.int8 or kernels.supports_fp8(device))):
        return f"the device has no {'int8' if weight.dtype == torch.int8 else 'fp8'} products by Triton"
    if any(size % _MULTIPLE for size in weight.shape):
        return f"its sizes are no multiples of {_MULTIPLE}"
    if block[1] and (block != (BLOCK, BLOCK) or weight.shape[1] % BLOCK):
        return f"its scales are not by blocks of {BLOCK} x {BLOCK}"
    return None if block[1] or block[0] == 1 else "its scales are not by output"
