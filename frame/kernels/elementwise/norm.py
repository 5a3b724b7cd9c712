# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""RMSNorm fused with the addition of the residual stream: y = norm(x + residual).

Reference: `frame.models.layers.norm.RMSNorm`. Depends on no layer.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED
from frame.kernels.launch import (
    PreparedLaunch,
    ceil_div,
    choose_rows_per_program,
    choose_warps,
    launch_dependents,
    next_power_of_2,
    wait_for_previous,
)

_ELEMENTS = 1024  # elements per program at least, so that short rows share a program


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, x [rows, size] -> contiguous [rows, size].

    Computed in float32. Rows may be strided.
    """
    return add_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual) for [rows, size]; without a residual the second result is
    `x` itself.

    The sum is rounded to the tensors' dtype, written over `residual`, and normed as rounded. With a
    residual, x may be a contiguous [rows, parts, size]; its parts are then summed in float32 and
    rounded first (the outputs of an MoE layer's experts).
    """
    rows, size = x.shape[0], x.shape[-1]
    partials = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    stream = x if residual is None else residual
    # not by the number of rows: the order of a row's sum depends on the warps of its program
    together = count_rows_per_program(size)
    together = choose_rows_per_program(rows, together) if INTERPRETED else together
    strides = x.stride(0), stream.stride(0)
    launch = _prepared(size, together, partials, residual is not None, (x.dtype, weight.dtype), strides, x.device)
    launch((ceil_div(rows, together), 1, 1), (x, stream, weight, out), (rows, *strides, eps))
    return out, stream


def count_rows_per_program(size: int) -> int:
    """The rows of `size` elements that one program of a GPU norms."""
    return max(1, _ELEMENTS // next_power_of_2(size))


@lru_cache(maxsize=256)
def _prepared(
    size: int, rows: int, partials: int, adds: bool, types: tuple[torch.dtype, torch.dtype], strides: tuple[int, int], device: torch.device
) -> PreparedLaunch:
    dtype, weight = types
    constants = {"SIZE": size, "BLOCK": next_power_of_2(size), "ROWS": rows, "PARTIALS": partials, "ADDS": adds}
    return PreparedLaunch(
        _add_rms_norm, (dtype, dtype, weight, dtype, 0, *strides, 0.0), constants, device, choose_warps(next_power_of_2(size) * rows)
    )


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    x, residual, weight, out, rows, x_stride, residual_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PARTIALS: tl.constexpr,  # rows of x that are summed to one
    ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of ROWS rows. A program holds whole rows."""
    launch_dependents(PDL)
    columns = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = columns < SIZE
    if ROWS > 1:
        inside &= row < rows
    row = row.to(tl.int64)
    wait_for_previous(PDL)
    stream = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if PARTIALS > 1:
        for partial in tl.static_range(1, PARTIALS):
            stream += tl.load(x + row * x_stride + partial * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        stream = stream.to(x.dtype.element_ty).to(tl.float32)
    if ADDS:
        places = residual + row * residual_stride + columns
        stream += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        rounded = stream.to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=inside)
        stream = rounded.to(tl.float32)
    mean = tl.sum(stream * stream, 1, keep_dims=True) / SIZE
    normed = stream * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * SIZE + columns, normed.to(out.dtype.element_ty), mask=inside)
