# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Root-mean-square normalisation of rows, with the addition of the residual stream before it, in one pass.

Reference: `frame.models.layers.norm.RMSNorm`. Knows no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import begin, blocks_of, options, power_of_2, rows_per_program, wait_for_previous, warps_for

_ELEMENTS = 1024  # of a program at least, so that short rows share one


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, [rows, size] -> contiguous [rows, size], float32 inside. Rows may have gaps."""
    return add_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual) for [rows, size]; without a residual the second is `x` itself.

    The sum is rounded to the tensors' type, written over `residual`, and normed as rounded.
    """
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = power_of_2(size)
    together = rows_per_program(rows, _ELEMENTS // block)
    stream = x if residual is None else residual
    _add_rms_norm[(blocks_of(rows, together),)](
        x, stream, weight, out, rows, x.stride(0), stream.stride(0), eps,
        SIZE=size, BLOCK=block, ROWS=together, ADDS=residual is not None, **options(x.device, warps_for(block * together)),
    )  # fmt: skip
    return out, stream


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    columns = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = columns < SIZE
    if ROWS > 1:
        inside &= row < rows
    row = row.to(tl.int64)
    wait_for_previous(PDL)
    stream = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        places = residual + row * residual_stride + columns
        stream += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        rounded = stream.to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=inside)
        stream = rounded.to(tl.float32)
    mean = tl.sum(stream * stream, 1, keep_dims=True) / SIZE
    normed = stream * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * SIZE + columns, normed.to(out.dtype.element_ty), mask=inside)
