# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The product of many rows with gate and up, and their activation, in one kernel: what the two would write is not read again.

Programs are as many as multiprocessors, and go from tile to tile. A tile's weights are a box of two: rows of gate, and those of up that
belong to them, side by side, so that both are one product of tensor cores, and meet in registers. Knows no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from frame.kernels import INTERPRETED
from frame.kernels.launch import ceil_div, launch_dependents, launch_options, wait_for_previous

_ROWS, _OUTPUTS, _INPUTS = 128, 128, 64  # of a tile
_TALL = 8  # tiles of rows that follow one another over the same weights
_WARPS, _STAGES = 8, 3
_ALIGNMENT = 16  # bytes, of what boxes are cut from
_FULL = 0.8  # of the multiprocessors, over all rounds
_MANY = 1024  # rows; with fewer, PyTorch's product is the faster by more than the activation takes


def is_faster(rows: int, inner: int, programs: int, batches: tuple[int, ...] = ()) -> bool:
    """Whether one kernel beats PyTorch's product and the activation behind it, by what was measured (`docs/performance.md`): for many
    rows, or as few as one of `batches` says, where tiles leave few multiprocessors idle."""
    if rows < _MANY and rows not in batches:
        return False
    tiles = ceil_div(rows, _ROWS) * ceil_div(inner, _OUTPUTS)
    return tiles >= _FULL * programs * ceil_div(tiles, programs)


def can_use_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether boxes can be cut from both: rows that begin at multiples of 16 bytes, and are contiguous."""
    size = x.element_size()
    starts = x.data_ptr() | weight.data_ptr() | x.stride(0) * size | weight.stride(0) * size
    return x.stride(1) == 1 and weight.stride(1) == 1 and starts % _ALIGNMENT == 0


def gated_linear(x: torch.Tensor, weight: torch.Tensor, programs: int) -> torch.Tensor:
    """SiLU(gate) * up [rows, inner] of x [rows, inputs], where `weight` [2 * inner, inputs] has the rows of gate, then those of up.

    bfloat16 or float16; sums are float32, and rounded before the activation as a product of its own would. See `can_use_tma`.
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
    x,  # boxes of [rows, inputs]
    weight,  # boxes of [2, inner, inputs]
    out,  # boxes of [rows, inner]
    rows,
    inner,
    inputs,
    programs,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TALL: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
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
            if UPCAST:  # the interpreter multiplies bfloat16 wrongly
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            sums = tl.dot(left, right.T, sums, input_precision="ieee")
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BM, 2, BN)), (0, 2, 1)))
        gate = gate.to(out.dtype).to(tl.float32)
        up = up.to(out.dtype).to(tl.float32)
        out.store([m, n], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))
