# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""SiLU-and-multiply of gated feed-forward layers: out = SiLU(gate) * up.

Reference: `frame.models.layers.mlp.GatedMLP`. Depends on no layer.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.kernels.launch import (
    PreparedLaunch,
    ceil_div,
    choose_rows_per_program,
    choose_warps,
    launch_dependents,
    next_power_of_2,
    wait_for_previous,
)

# columns per program for at most `_FEW_ROWS` rows; twice as many for more rows, since each program
# has a start-up cost under PDL
_COLUMNS = 1024
_FEW_ROWS = 64


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up of gate_up [rows, 2 * inner] (gate first) -> contiguous [rows, inner].

    Computed in float32 and rounded once. Rows may be strided; the last dimension is contiguous.
    """
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, inner))
    block = min(_COLUMNS if rows <= _FEW_ROWS else 2 * _COLUMNS, next_power_of_2(inner))
    together = choose_rows_per_program(rows, _COLUMNS // block)
    stride = gate_up.stride(0)
    launch = _prepared(inner, block, together, gate_up.dtype, stride, gate_up.device)
    launch((ceil_div(rows, together), ceil_div(inner, block), 1), (gate_up, out), (rows, stride))
    return out


@lru_cache(maxsize=256)
def _prepared(inner: int, block: int, rows: int, dtype: torch.dtype, stride: int, device: torch.device) -> PreparedLaunch:
    constants = {"INNER": inner, "BLOCK": block, "ROWS": rows}
    return PreparedLaunch(_silu_mul, (dtype, dtype, 0, stride), constants, device, choose_warps(block * rows))


@triton.jit(do_not_specialize=["rows"])
def _silu_mul(gate_up, out, rows, stride, INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Grid: (blocks of ROWS rows, blocks of BLOCK columns)."""
    launch_dependents(PDL)
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
