# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""SiLU(gate) * up of many rows for compute capability 9.0: `gated_linear` as a warp-specialized
Gluon kernel.

Gluon does not run under Triton's interpreter. Depends on no layer; `gated_linear.is_faster` decides
for which row counts to use it.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from frame.kernels.gluon_pipeline import allocate_barriers, multiply_items, view
from frame.kernels.launch import ceil_div

BATCHES = (128, 256)  # decode batch sizes with whole tiles for which it is also faster (measured)
_ROWS, _OUTPUTS, _INPUTS = 128, 128, 64  # rows and outputs of a tile; inputs of one pipeline item
_STAGES = 4  # pipeline stages, 48 KiB each
_TALL = 16  # row tiles that reuse the same weight tile before the next one (for L2 hits)
_REGISTERS, _FEW_REGISTERS = 240, 24  # registers per consumer thread, and per producer thread
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def can_tile(inner: int, inputs: int) -> bool:
    """Whether whole tiles cover the outputs and the inputs; rows may end inside a tile.
    `gated_linear.can_use_tma` must hold too."""
    return inner % _OUTPUTS == 0 and inputs % _INPUTS == 0


def gated_prefill(x: torch.Tensor, weight: torch.Tensor, programs: int) -> torch.Tensor:
    """SiLU(gate) * up [rows, inner] of x [rows, inputs]; `weight` [2 * inner, inputs] holds the
    gate rows, then the up rows.

    bfloat16 or float16. Sums and activation are float32 and rounded once. Requires `can_tile`.
    """
    rows, inputs = x.shape
    inner = weight.shape[0] // 2
    out = x.new_empty((rows, inner))
    down, across = ceil_div(rows, _ROWS), inner // _OUTPUTS
    prefill_kernel[(min(programs, down * across),)](
        *_boxes(x, weight, out), inner, down, across, inputs // _INPUTS,
        STAGES=_STAGES, TALL=_TALL, REGISTERS=_REGISTERS, FEW_REGISTERS=_FEW_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out


def _boxes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[TensorDescriptor, ...]:
    shapes = ((x, [_ROWS, _INPUTS]), (weight, [_OUTPUTS, _INPUTS]), (out, [_ROWS // 2, _OUTPUTS]))
    return tuple(TensorDescriptor(whole, list(whole.shape), [whole.stride(0), 1], box, _LAYOUT) for whole, box in shapes)


@gluon.jit
def locate_tile(tile, down, across, TALL: gl.constexpr):
    """Tile number -> (row tile, output tile): TALL row tiles, then the next output tile."""
    top = tile // (TALL * across) * TALL
    height = min(down - top, TALL)
    rest = tile % (TALL * across)
    return top + rest % height, rest // height


@gluon.jit
def produce(xs, weights, x, w, ready, free, inner, down, across, steps, TALL: gl.constexpr):
    """The producer warp: load the TMA boxes of all items in turn, each when its stage is free."""
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = xs.block_shape[0]
    OUTPUTS: gl.constexpr = weights.block_shape[0]
    item = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = locate_tile(tile, down, across, TALL)
        for k in range(steps):
            stage = item % STAGES
            mbarrier.wait(free.index(stage), (item // STAGES & 1) ^ 1)
            barrier = ready.index(stage)
            mbarrier.expect(barrier, (ROWS + 2 * OUTPUTS) * 128)
            tma.async_copy_global_to_shared(xs, [m * ROWS, k * 64], barrier, view(x, stage * 2, ROWS, 64))
            tma.async_copy_global_to_shared(weights, [n * OUTPUTS, k * 64], barrier, w.index(stage * 2))
            tma.async_copy_global_to_shared(weights, [inner + n * OUTPUTS, k * 64], barrier, w.index(stage * 2 + 1))
            item += 1


@gluon.jit
def consume(out, x, w, results, ready, free, down, across, steps, CONSUMER: gl.constexpr, TALL: gl.constexpr):
    """A consumer group (four warps): multiply 64 rows of each tile, apply the activation, store by
    TMA."""
    HALF: gl.constexpr = w.shape[1]
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    item = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = locate_tile(tile, down, across, TALL)
        sums = multiply_items(x, w, ready, free, item, steps, CONSUMER)
        item += steps
        gate, up = sums.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
        gate = gl.convert_layout(gate, half_layout, assert_trivial=True)
        up = gl.convert_layout(up, half_layout, assert_trivial=True)
        tma.store_wait(0)
        results.index(CONSUMER).store((gate / (1.0 + gl.exp(-gate)) * up).to(w.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [m * 128 + CONSUMER * 64, n * HALF], results.index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["inner", "down", "across", "steps"])
def prefill_kernel(
    xs,  # TMA descriptor of [rows, inputs], box [128, 64]
    weights,  # TMA descriptor of [2 * inner, inputs], box [128, 64]
    out,  # TMA descriptor of [rows, inner], box [64, 128]
    inner,
    down,  # row tiles
    across,  # output tiles
    steps,  # pipeline items per tile
    STAGES: gl.constexpr,  # pipeline stages
    TALL: gl.constexpr,  # row tiles per weight tile
    REGISTERS: gl.constexpr,
    FEW_REGISTERS: gl.constexpr,
):
    """Grid: min(multiprocessors, tiles). Persistent programs loop over output tiles; not launched
    with PDL.

    One producer warp keeps the shared-memory pipeline full by TMA, also while results are stored.
    Two consumer groups of four warps multiply 64 rows each, with gate and up as one MMA of 256
    outputs whose halves meet in registers (the producer-consumer structure of CUTLASS's "pingpong"
    kernels and FlashAttention-3).
    """
    x = gl.allocate_shared_memory(xs.dtype, [STAGES * 2, xs.block_shape[0] // 2, 64], xs.layout)
    w = gl.allocate_shared_memory(xs.dtype, [STAGES * 2, weights.block_shape[0], 64], xs.layout)
    results = gl.allocate_shared_memory(xs.dtype, [2, out.block_shape[0], out.block_shape[1]], xs.layout)
    ready, free = allocate_barriers(STAGES, 1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (out, x, w, results, ready, free, down, across, steps, 0, TALL)),
            (consume, (out, x, w, results, ready, free, down, across, steps, 1, TALL)),
            (produce, (xs, weights, x, w, ready, free, inner, down, across, steps, TALL)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
