# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Quantization of rows to fp8 and int8: one scale per row, a static one for all, or for fp8 one
per 128 columns; and rescaling of the sums of their GEMMs.

scale = max(|x|) / 448, at least 1e-12; out = x / scale as e4m3. int8: 127 instead of 448. What a
static scale does not hold becomes the largest number. Depends on no layer; weights are quantized in
`frame.quantization`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED

FP8 = torch.float8_e4m3fn
GROUP = 128
_SMALLEST = tl.constexpr(1e-12)
_GROUPS = 8  # groups of 128 columns per program


@triton.jit
def wait_and_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel launch, then wait for the previous one (PDL)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def round_to_fp8(values, INTERPRETED: tl.constexpr):
    """float32 -> e4m3. Triton's interpreter drops the carry into the next power of two, so its
    values are rounded here first."""
    if INTERPRETED:
        size = tl.exp2(tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(values), 1e-30))), -6.0) - 3.0)
        values = tl.floor(values / size + 0.5) * size
    return values.to(tl.float8e4nv)


@triton.jit
def rows_kernel(
    x, out, scale, static, K, x_stride, BLOCK: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Grid: rows. STATIC: by the scale at `static`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_and_launch_dependents(PDL)
    values = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    IS_INTEGER: tl.constexpr = out.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = 127.0 if IS_INTEGER else 448.0
    if STATIC:
        step = tl.load(static)
        values = tl.clamp(values, -LARGEST * step, LARGEST * step, propagate_nan=tl.PropagateNan.ALL)
    else:
        step = tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, _SMALLEST)
    if IS_INTEGER:  # integers have no NaN, and `tl.max` passes over it: the scale keeps it visible
        step = tl.where(tl.max((values != values).to(tl.int32), 0) > 0, float("nan"), step)
    tl.store(scale + row, step)
    if IS_INTEGER:
        rounded = tl.floor(values / step + 0.5).to(tl.int8)
    else:
        rounded = round_to_fp8(values / step, INTERPRETED)
    tl.store(out + row * K + columns, rounded, mask=columns < K)


@triton.jit(do_not_specialize=["M", "scale_stride"])
def groups_kernel(
    x, out, scale, M, K, x_stride, scale_stride,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS rows, blocks of GROUPS groups)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.program_id(1) * GROUPS * 128 + tl.arange(0, GROUPS * 128)
    wait_and_launch_dependents(PDL)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    values = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    values = tl.reshape(values, [ROWS, GROUPS, 128])
    step = tl.maximum(tl.max(tl.abs(values), 2) / 448.0, _SMALLEST)
    tl.store(scale + groups[None, :] * scale_stride + rows[:, None], step, mask=(rows < M)[:, None] & (groups * 128 < K)[None, :])
    values = tl.reshape(round_to_fp8(values / step[:, :, None], INTERPRETED), [ROWS, GROUPS * 128])
    tl.store(out + rows.to(tl.int64)[:, None] * K + columns[None, :], values, mask=mask)


@triton.jit
def rescale_kernel(sums, out, by_row, by_column, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (rows, blocks of BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    # scales of a weight: no step writes them, so they are read before the wait
    factors = tl.load(by_column + columns, mask=mask, other=0.0)
    wait_and_launch_dependents(PDL)
    values = tl.load(sums + row * N + columns, mask=mask).to(tl.float32)
    tl.store(out + row * N + columns, (values * (factors * tl.load(by_row + row))).to(out.dtype.element_ty), mask=mask)


def quantize_rows(
    x: torch.Tensor, pdl: bool = False, dtype: torch.dtype = FP8, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], rows contiguous -> (e4m3 or int8 [M, K], float32 [M, 1]). The largest magnitude of
    a row becomes 448 or 127, unless a scale is `static`, float32 [1]."""
    rows, inner = x.shape
    out = torch.empty(rows, inner, dtype=dtype, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = 1 << (inner - 1).bit_length()
    rows_kernel[(rows,)](
        x, out, scale, scale if static is None else static, inner, x.stride(0),
        BLOCK=block, STATIC=static is not None, PDL=pdl, INTERPRETED=INTERPRETED,
        num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out, scale


def quantize_groups(x: torch.Tensor, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], K a multiple of 128 -> (e4m3 [P, K], float32 [P, K / 128] with stride(0) 1).

    P is M rounded up to a multiple of 4, which cuBLAS requires. Rows past M are undefined.
    """
    rows, inner = x.shape
    padded = -(-rows // 4) * 4
    out = torch.empty(padded, inner, dtype=FP8, device=x.device)
    scale = torch.empty(inner // GROUP, padded, dtype=torch.float32, device=x.device)
    per_program = 1 if rows <= 64 else 4
    groups_kernel[(-(-rows // per_program), -(-inner // (GROUP * _GROUPS)))](
        x, out, scale, rows, inner, x.stride(0), padded, ROWS=per_program, GROUPS=_GROUPS, PDL=pdl, INTERPRETED=INTERPRETED,
        num_warps=2 * per_program, launch_pdl=pdl,
    )  # fmt: skip
    return out, scale.t()


def rescale(
    sums: torch.Tensor, by_row: torch.Tensor, by_column: torch.Tensor, pdl: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sums [M, N], contiguous, times by_row float32 [M, 1] and by_column float32 [N], in place,
    or as a new tensor of `dtype`."""
    rows, columns = sums.shape
    out = sums if dtype is None else torch.empty_like(sums, dtype=dtype)
    rescale_kernel[(rows, -(-columns // 1024))](sums, out, by_row, by_column, columns, BLOCK=1024, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out
