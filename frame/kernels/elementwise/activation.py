# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""SiLU-and-multiply of gated feed-forward layers: out = SiLU(gate) * up, and the output gate of
attention: out = x * sigmoid(gate).

References: `frame.models.layers.mlp.GatedMLP` and `frame.models.layers.attention`. Depends on no
layer.
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


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate) -> contiguous [tokens, heads * dim]. Computed in float32 and rounded once.

    x: [tokens, heads * dim], whose rows may be strided. gate: [tokens, heads, dim], whose tokens
    and heads may be strided.
    """
    (tokens, heads, dim), strides = gate.shape, (x.stride(0), *gate.stride()[:2])
    out = x.new_empty(x.shape)
    launch, block = _prepared_gate(heads, dim, x.dtype, strides, x.device)
    launch((tokens, ceil_div(heads * dim, block), 1), (x, gate, out), strides)
    return out


@lru_cache(maxsize=256)
def _prepared_gate(heads: int, dim: int, dtype: torch.dtype, strides: tuple[int, ...], device: torch.device) -> tuple[PreparedLaunch, int]:
    """The launch, and the entries of a program."""
    block = min(_COLUMNS, next_power_of_2(heads * dim))
    constants = {"SIZE": heads * dim, "DIM": dim, "BLOCK": block}
    return PreparedLaunch(_sigmoid_mul, (dtype, dtype, dtype, *strides), constants, device, choose_warps(block)), block


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
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * INNER + columns, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_mul(
    x, gate, out, x_stride, token_stride, head_stride,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of BLOCK entries)."""
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < SIZE
    wait_for_previous(PDL)
    gates = tl.load(gate + token * token_stride + entries // DIM * head_stride + entries % DIM, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + token * x_stride + entries, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + entries, (values * tl.sigmoid(gates)).to(out.dtype.element_ty), mask=inside)
