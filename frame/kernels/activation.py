# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The activation of gated feed-forward layers, in one pass over gate and up side by side.

Reference: `frame.models.layers.mlp.GatedMLP`. Knows no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import begin, blocks_of, options, power_of_2, rows_per_program, wait_for_previous, warps_for

_COLUMNS = 1024  # of a program, while rows are few; then twice as many, as programs that wait for one another start slowly
_FEW_ROWS = 64


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up for [rows, gate | up], each `inner` wide -> contiguous [rows, inner], float32 inside. Rows may have gaps."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    columns = _COLUMNS if rows <= _FEW_ROWS else 2 * _COLUMNS
    block = min(columns, power_of_2(inner))
    together = rows_per_program(rows, columns // block)
    _silu_mul[(blocks_of(rows, together), blocks_of(inner, block))](
        gate_up, out, rows, gate_up.stride(0), INNER=inner, BLOCK=block, ROWS=together,
        **options(gate_up.device, warps_for(block * together)),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _silu_mul(gate_up, out, rows, stride, INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = columns < INNER
    if ROWS > 1:
        inside &= row < rows
    row = row.to(tl.int64)
    places = gate_up + row * stride + columns
    wait_for_previous(PDL)
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + INNER, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * INNER + columns, product.to(out.dtype.element_ty), mask=inside)
