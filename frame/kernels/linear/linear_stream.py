# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Skinny GEMM for large weights on compute capability 9.0: up to 64 rows, weights streamed by TMA;
16-bit, or float8 with one scale per row and per output.

Written in Gluon, because Triton's pipelined loops start no copy before the PDL wait; it does not
run under the interpreter. `linear_plan` selects the sizes. Depends on no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from frame.kernels.gluon_pipeline import allocate_barriers, view
from frame.kernels.launch import PreparedLaunch, ceil_div, launch_dependents, next_power_of_2, wait_for_previous
from frame.kernels.linear.linear_plan import PROCESSORS, Plan

_MIN_ROWS, _MIN_OUTPUTS = 8, 64  # the smallest MMA: rows, outputs
_BOX_BYTES = 128  # of one row of a TMA box
_LAYOUTS = {size: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=2) for size in (1, 2)}
# registers per thread; fewer registers let more small kernels run beside this one
_FEW_REGISTERS, _MANY_REGISTERS = 96, 168


@gluon.jit
def fetch_box(box, w, barrier, place, row, column, SLICE: gl.constexpr):
    """Start the TMA copy of one box of a slice. The slice is made up of power-of-two boxes, largest
    first."""
    HEIGHT: gl.constexpr = box.block_shape[0]
    ABOVE: gl.constexpr = SLICE // (2 * HEIGHT) * (2 * HEIGHT)
    tma.async_copy_global_to_shared(box, [row + ABOVE, column], barrier, view(w, place + ABOVE // 8, HEIGHT, w.shape[2]))


@gluon.jit
def fetch_weights(
    large, medium, small, w, x, ready, item, first, column, N, SLICE: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr
):
    """Start the copies of an item's weights, and make its barrier expect them and the item's
    inputs."""
    STAGES: gl.constexpr = ready.shape[0]
    CHUNKS: gl.constexpr = x.shape[0] // STAGES
    COLUMNS: gl.constexpr = x.shape[2]
    stage = item % STAGES
    barrier = ready.index(stage)
    mbarrier.expect(barrier, (PIECES * SLICE + x.shape[1]) * CHUNKS * 128)
    for c in gl.static_range(CHUNKS):
        for p in gl.static_range(PIECES):
            place = ((stage * CHUNKS + c) * PIECES + p) * (SLICE // 8)
            fetch_box(large, w, barrier, place, first + p * N, column + c * COLUMNS, SLICE)
            if BOXES > 1:
                fetch_box(medium, w, barrier, place, first + p * N, column + c * COLUMNS, SLICE)
            if BOXES > 2:
                fetch_box(small, w, barrier, place, first + p * N, column + c * COLUMNS, SLICE)


@gluon.jit
def fetch_inputs(inputs, x, ready, item, column):
    """Start the copy of an item's inputs."""
    STAGES: gl.constexpr = ready.shape[0]
    CHUNKS: gl.constexpr = x.shape[0] // STAGES
    stage = item % STAGES
    target = view(x, stage * CHUNKS, x.shape[1], CHUNKS * x.shape[2])
    tma.async_copy_global_to_shared(inputs, [0, column], ready.index(stage), target)


@gluon.jit
def produce(
    inputs, large, medium, small, w, x, ready, free, steps, total, N,
    SLICE: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: load all items in turn, each when its stage is free. Weights of the first
    items are loaded before the PDL wait, their inputs after it."""
    STAGES: gl.constexpr = ready.shape[0]
    WIDTH: gl.constexpr = x.shape[0] // STAGES * x.shape[2]
    for item in range(min(STAGES, total)):
        first = (gl.program_id(0) + item // steps * gl.num_programs(0)) * SLICE
        fetch_weights(large, medium, small, w, x, ready, item, first, item % steps * WIDTH, N, SLICE, PIECES, BOXES)
    wait_for_previous(PDL)
    for item in range(min(STAGES, total)):
        fetch_inputs(inputs, x, ready, item, item % steps * WIDTH)
    for item in range(STAGES, total):
        mbarrier.wait(free.index(item % STAGES), (item // STAGES & 1) ^ 1)
        first = (gl.program_id(0) + item // steps * gl.num_programs(0)) * SLICE
        fetch_weights(large, medium, small, w, x, ready, item, first, item % steps * WIDTH, N, SLICE, PIECES, BOXES)
        fetch_inputs(inputs, x, ready, item, item % steps * WIDTH)


@gluon.jit
def store_slice(gate, up, bias, out, M, N, first, SLICE: gl.constexpr, PIECES: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Store a slice's results, from output `first` on: plus bias; with two parts, SiLU(gate) * up
    of rounded values."""
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gate.type.layout
    outputs = gl.arange(0, gate.shape[0], gl.SliceLayout(1, layout))
    rows = gl.arange(0, gate.shape[1], gl.SliceLayout(0, layout))
    inside = outputs < SLICE
    if HAS_BIAS:
        gate += gl.load(bias + first + outputs, mask=inside, other=0.0).to(gl.float32)[:, None]
    if PIECES == 2:
        if HAS_BIAS:
            up += gl.load(bias + N + first + outputs, mask=inside, other=0.0).to(gl.float32)[:, None]
        gate = gate.to(dtype).to(gl.float32)
        gate = gate / (1.0 + gl.exp(-gate)) * up.to(dtype).to(gl.float32)
    places = out + rows[None, :] * N + (first + outputs)[:, None]
    gl.store(places, gate.to(dtype), mask=(rows < M)[None, :] & inside[:, None])


@gluon.jit
def consume(
    w, x, ready, free, by_row, by_output, bias, out, M, N, slices, steps,
    SLICE: gl.constexpr, TILE: gl.constexpr, PIECES: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer warps: multiply each item when it is ready, and store each slice. GEMMs of
    float8 items are summed outside the MMA, whose float8 sums have too few bits."""
    STAGES: gl.constexpr = ready.shape[0]
    CHUNKS: gl.constexpr = x.shape[0] // STAGES
    ROWS: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    SCALED: gl.constexpr = COLUMNS == 128  # float8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, COLUMNS // 4])
    wait_for_previous(PDL)
    item = 0
    for cut in range(gl.program_id(0), slices, gl.num_programs(0)):
        gate = gl.zeros([TILE, ROWS], gl.float32, layout)
        up = gl.zeros([TILE, ROWS], gl.float32, layout)
        if SCALED:
            factors = load_factors(by_row, by_output + cut * SLICE, M, SLICE, TILE, layout)
            factors_up = load_factors(by_row, by_output + (PIECES - 1) * N + cut * SLICE, M, SLICE, TILE, layout)
        for _ in range(steps):
            stage = item % STAGES
            mbarrier.wait(ready.index(stage), item // STAGES & 1)
            gates = warpgroup_mma_init(gate)
            ups = warpgroup_mma_init(up)
            for c in gl.static_range(CHUNKS):
                right = x.index(stage * CHUNKS + c).permute((1, 0))
                place = (stage * CHUNKS + c) * PIECES * (SLICE // 8)
                gates = warpgroup_mma(view(w, place, TILE, COLUMNS), right, gates, use_acc=c > 0 or not SCALED, is_async=True)
                if PIECES == 2:
                    ups = warpgroup_mma(view(w, place + SLICE // 8, TILE, COLUMNS), right, ups, use_acc=c > 0 or not SCALED, is_async=True)
            sums, sums_up = warpgroup_mma_wait(0, deps=(gates, ups))
            mbarrier.arrive(free.index(stage), count=1)
            gate = gate + sums if SCALED else sums
            up = up + sums_up if SCALED else sums_up
            item += 1
        if SCALED:
            gate *= factors
            up *= factors_up
        store_slice(gate, up, bias, out, M, N, cut * SLICE, SLICE, PIECES, HAS_BIAS)


@gluon.jit
def load_factors(by_row, by_output, M, SLICE: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """The products of the scales of a slice's outputs and of the rows."""
    outputs = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    rows = gl.arange(0, layout.instr_shape[1], gl.SliceLayout(0, layout))
    of_outputs = gl.load(by_output + outputs, mask=outputs < SLICE, other=0.0)
    return of_outputs[:, None] * gl.load(by_row + rows, mask=rows < M, other=0.0)[None, :]


@gluon.jit(do_not_specialize=["M", "N", "slices", "steps"])
def stream_kernel(
    inputs,  # TMA descriptor of [M, K], box [ROWS, CHUNKS * 128 bytes]
    large,  # TMA descriptor of the weights [PIECES * N, K], box [a power of two, 128 bytes]
    medium, small,
    by_row,  # float8: scales [M]; else not read
    by_output,  # float8: scales [PIECES * N]; else not read
    bias,  # [PIECES * N]
    out,  # [M, N]
    M, N, slices,
    steps,  # pipeline items per slice
    ROWS: gl.constexpr,  # at least M
    SLICE: gl.constexpr,  # outputs per slice
    TILE: gl.constexpr,  # SLICE rounded up to a power of two
    CHUNKS: gl.constexpr,  # chunks of 128 bytes of inputs per item
    PIECES: gl.constexpr,  # 2: gate and up
    BOXES: gl.constexpr,  # boxes per slice
    STAGES: gl.constexpr,  # pipeline stages
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: programs. Each takes the slices program_id, program_id + programs, …

    The outputs are divided into equal slices, so that all programs end together. In each program
    one producer warp keeps the shared-memory pipeline full, starting before the PDL wait; the
    consumer warps multiply, with the weights as the left MMA operand, so that eight rows fill the
    short side. Slices lie in shared memory without gaps: the MMA of a slice also reads the rows
    after it, and those results are dropped.
    """
    BEYOND: gl.constexpr = (TILE - SLICE) // 8  # rows past the last slice that its MMA reads
    COLUMNS: gl.constexpr = large.block_shape[1]
    w = gl.allocate_shared_memory(large.dtype, [STAGES * CHUNKS * PIECES * SLICE // 8 + BEYOND, 8, COLUMNS], large.layout)
    x = gl.allocate_shared_memory(large.dtype, [STAGES * CHUNKS, ROWS, COLUMNS], large.layout)
    ready, free = allocate_barriers(STAGES, 1, 1)
    fence_async_shared()
    total = gl.cdiv(slices - gl.program_id(0), gl.num_programs(0)) * steps
    launch_dependents(PDL)
    gl.warp_specialize(
        [
            (
                consume,
                (w, x, ready, free, by_row, by_output, bias, out, M, N, slices, steps, SLICE, TILE, PIECES, HAS_BIAS, PDL, num_warps),
            ),
            (produce, (inputs, large, medium, small, w, x, ready, free, steps, total, N, SLICE, PIECES, BOXES, PDL)),
        ],
        [1],
        [40],
    )


def stream_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    gated: bool = False,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `linear.skinny_linear`, for a `stream` plan, whose `outputs` divide those of the result.

    Rows of `x` and of the weight start at multiples of 16 bytes. Both may be e4m3: then `scales`
    are float32 of the rows and of the weight's outputs, contiguous, `dtype` is the result's, and
    `plan.chunks` is a multiple of four.
    """
    rows, inner = x.shape
    pieces = 2 if gated else 1
    outputs = weight.shape[0] // pieces
    slices = outputs // plan.outputs
    dtype = dtype or x.dtype
    shape = _Shape(next_power_of_2(max(rows, _MIN_ROWS)), pieces, bias is not None, x.dtype, dtype)
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    tensors = (*_boxes(x, weight, shape.rows, plan), *(scales or (out, out)), out if bias is None else bias, out)
    programs = ceil_div(slices, ceil_div(slices, PROCESSORS))
    _prepared(shape, plan, x.device)((programs, 1, 1), tensors, (rows, outputs, slices, ceil_div(inner, 32 * plan.chunks)))
    return out


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a kernel variant depends on besides its plan."""

    rows: int  # rows of the box of inputs
    pieces: int
    has_bias: bool
    dtype: torch.dtype  # of the rows and weights
    result: torch.dtype


def _heights(share: int) -> list[int]:
    return [1 << bit for bit in range(share.bit_length(), 2, -1) if share >> bit & 1]


def _boxes(x: torch.Tensor, weight: torch.Tensor, rows: int, plan: Plan) -> tuple[TensorDescriptor, ...]:
    """Descriptors of the rows, and three of the weights, tallest first. A slice that needs fewer
    boxes repeats them."""
    size, strides = list(weight.shape), [weight.stride(0), 1]
    heights = (_heights(plan.outputs) * 3)[:3]
    layout, columns = _LAYOUTS[weight.itemsize], _BOX_BYTES // weight.itemsize
    return (
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, 32 * plan.chunks], layout),
        *(TensorDescriptor(weight, size, strides, [height, columns], layout) for height in heights),
    )


@lru_cache(maxsize=256)
def _prepared(shape: _Shape, plan: Plan, device: torch.device) -> PreparedLaunch:
    x = torch.empty((shape.rows, 32 * plan.chunks), dtype=shape.dtype, device=device)
    columns = _BOX_BYTES // x.itemsize
    boxes = _boxes(x, x.new_empty((plan.outputs, columns)), shape.rows, plan)
    scale = torch.float32 if x.itemsize == 1 else shape.result
    example = (*boxes, scale, scale, shape.result, shape.result, 0, 0, 0, 0)
    tile = next_power_of_2(max(plan.outputs, _MIN_OUTPUTS))
    sums = shape.rows * tile * shape.pieces // (32 * plan.warps)
    chunks = 32 * plan.chunks // columns
    constants = {"ROWS": shape.rows, "SLICE": plan.outputs, "TILE": tile, "CHUNKS": chunks, "PIECES": shape.pieces}
    constants |= {"BOXES": len(_heights(plan.outputs)), "STAGES": plan.depth, "HAS_BIAS": shape.has_bias}
    constants |= {"maxnreg": _MANY_REGISTERS if sums > 24 else _FEW_REGISTERS}
    return PreparedLaunch(stream_kernel, example, constants, device, plan.warps)
