# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""GEMM of many rows with gate and up weights, fused with their activation: out = SiLU(x @ gate.T) *
(x @ up.T).

The gate and up GEMMs are not written to memory and read again. Persistent Triton kernel: one
program per multiprocessor loops over output tiles. The weights of a tile are one TMA box of two
parts (gate rows and the matching up rows), so that both are one MMA whose halves meet in registers.
Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from frame.kernels import INTERPRETED
from frame.kernels.launch import ceil_div, launch_dependents, launch_options, wait_for_previous

_ROWS, _OUTPUTS, _INPUTS = 128, 128, 64  # rows, outputs and inputs of a tile
_TALL = 8  # row tiles that reuse the same weight tile before the next one (for L2 hits)
_WARPS, _STAGES = 8, 3
_ALIGNMENT = 16  # bytes: alignment that TMA requires
_FULL = 0.8  # share of the multiprocessors that tiles must keep busy, over all waves
_MANY = 1024  # rows; for fewer, PyTorch's GEMM is faster by more than the separate activation costs


def is_faster(rows: int, inner: int, programs: int, batches: tuple[int, ...] = ()) -> bool:
    """Whether this kernel beats PyTorch's GEMM plus a separate activation, by measurement
    (docs/performance.md): for at least 1,024 rows, or for a number of rows in `batches`, if the
    tiles leave few multiprocessors idle in the last wave."""
    if rows < _MANY and rows not in batches:
        return False
    tiles = ceil_div(rows, _ROWS) * ceil_div(inner, _OUTPUTS)
    return tiles >= _FULL * programs * ceil_div(tiles, programs)


def can_use_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether TMA can read both: contiguous rows that start at multiples of 16 bytes."""
    size = x.element_size()
    starts = x.data_ptr() | weight.data_ptr() | x.stride(0) * size | weight.stride(0) * size
    return x.stride(1) == 1 and weight.stride(1) == 1 and starts % _ALIGNMENT == 0


def gated_linear(x: torch.Tensor, weight: torch.Tensor, programs: int) -> torch.Tensor:
    """SiLU(gate) * up [rows, inner] of x [rows, inputs]; `weight` [2 * inner, inputs] holds the
    gate rows, then the up rows.

    bfloat16 or float16. Sums are float32 and are rounded before the activation, as separate
    GEMMs would be. Requires `can_use_tma`. `programs`: multiprocessors to use.
    """
    rows, inputs = x.shape
    inner = weight.shape[0] // 2
    out = x.new_empty((rows, inner))
    stride = weight.stride(0)
    boxes = TensorDescriptor(weight, [2, inner, inputs], [inner * stride, stride, 1], [2, _OUTPUTS, _INPUTS])
    _gated_linear[(programs,)](
        TensorDescriptor.from_tensor(x, [_ROWS, _INPUTS]), boxes, TensorDescriptor.from_tensor(out, [_ROWS, _OUTPUTS]),
        rows, inner, inputs, programs, BM=_ROWS, BN=_OUTPUTS, BK=_INPUTS, TALL=_TALL, UPCAST=INTERPRETED, num_stages=_STAGES,
        **launch_options(x.device, _WARPS),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _gated_linear(
    x,  # TMA descriptor of [rows, inputs]
    weight,  # TMA descriptor of [2, inner, inputs]
    out,  # TMA descriptor of [rows, inner]
    rows, inner, inputs, programs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TALL: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: programs. Each takes every `programs`-th tile."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    down = tl.cdiv(rows, BM)
    across = tl.cdiv(inner, BN)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        top = tile // (TALL * across) * TALL
        height = min(down - top, TALL)
        m = (top + tile % (TALL * across) % height) * BM
        n = tile % (TALL * across) // height * BN
        sums = tl.zeros((BM, 2 * BN), tl.float32)
        for k in range(0, inputs, BK):
            left = x.load([m, k])
            right = tl.reshape(weight.load([0, n, k]), (2 * BN, BK))
            if UPCAST:  # the interpreter multiplies bfloat16 incorrectly
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            sums = tl.dot(left, right.T, sums, input_precision="ieee")
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BM, 2, BN)), (0, 2, 1)))
        gate = gate.to(out.dtype).to(tl.float32)
        up = up.to(out.dtype).to(tl.float32)
        out.store([m, n], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))
