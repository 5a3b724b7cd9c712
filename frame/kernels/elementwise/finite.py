# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Copies rows and replaces non-finite values, for kernels in which 0 * value must be 0.

Reference: `torch.nan_to_num`. Several times as fast for strided rows. Depends on no attention
backend.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED
from frame.kernels.launch import PreparedLaunch, ceil_div, launch_dependents, wait_for_previous

_ROWS = 64 if INTERPRETED else 8  # rows per program
_COLUMNS = 1024  # columns per program


def replace_non_finite_rows(x: torch.Tensor, maximum: float) -> torch.Tensor:
    """x [rows, size] (rows may be strided) -> contiguous [rows, size]. Values that are not finite,
    or above `maximum` in magnitude, become `maximum`."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        grid = ceil_div(rows, _ROWS), ceil_div(size, _COLUMNS), 1
        _prepared(size, x.stride(0), x.dtype, x.device, maximum)(grid, (x, out), (rows,))
    return out


@lru_cache(maxsize=64)
def _prepared(size: int, stride: int, dtype: torch.dtype, device: torch.device, maximum: float) -> PreparedLaunch:
    constants = {"SIZE": size, "STRIDE": stride, "MAXIMUM": maximum, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    return PreparedLaunch(_replace_non_finite_kernel, (dtype, dtype, 0), constants, device, 4)


@triton.jit(do_not_specialize=["rows"])
def _replace_non_finite_kernel(
    x, out, rows,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, MAXIMUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS rows, blocks of COLUMNS columns)."""
    launch_dependents(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (columns < SIZE)
    row = row.to(tl.int64)
    wait_for_previous(PDL)
    values = tl.load(x + row * STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(tl.abs(values) <= MAXIMUM, values, MAXIMUM)  # the comparison is false for NaN
    tl.store(out + row * SIZE + columns, values.to(out.dtype.element_ty), mask=inside)
