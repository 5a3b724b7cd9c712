# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Grouped GEMM of experts with many rows in float8, for compute capability 9.0: `expert_prefill`
with scales.

The scales are those of DeepSeek-V3: one per row and 128 inputs, and one per 128 x 128 weights. The
products of 128 inputs are summed by the tensor cores and then added, times their scales, to float32
sums in registers (as DeepGEMM does). Does not run under Triton's interpreter. Depends on no
routing; `expert_tiles` decides for which row counts it is used.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from frame.kernels.launch import PreparedLaunch, launch_dependents, wait_for_previous
from frame.kernels.moe.align import Alignment
from frame.kernels.moe.expert_prefill import (
    allocate_pipeline,
    make_boxes,
    make_grid,
    produce_down,
    produce_gate_up,
    receive_tile,
    scatter_halves,
    signal_store_turn,
    skip_items,
    wait_for_store_turn,
)

ROWS = 128  # rows per tile, and per block of the alignment
_BLOCK = 128  # inputs and outputs that share a scale; inputs per pipeline item
_STAGES = 4  # pipeline stages, 48 KiB each
_GATE_UP_REGISTERS, _DOWN_REGISTERS = (224, 56), (224, 24)  # registers per consumer thread, and per producer thread
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def can_tile(outputs: int, inputs: int) -> bool:
    """Whether whole tiles cover weights [experts, outputs, inputs]. The outputs of the first
    GEMM are gates and ups together."""
    return outputs % (2 * _BLOCK) == 0 and inputs % _BLOCK == 0


def compute_gate_up(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, pairs: int, top: int, order: Alignment
) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU(gate) * up of x [tokens, hidden] and `weight` [experts, 2 * inner, hidden], gates first:
    float8 [rows of the alignment, inner], and its scales.

    x and weights are float8, contiguous. Scales are float32: of rows [rows, inputs / 128] with
    stride(0) 1, of weights [experts, outputs / 128, inputs / 128], contiguous. Sums and activation
    are float32 and rounded once. `order` has blocks of `ROWS` rows, `pairs` pairs in all, `top` per
    token. Results of padding rows are undefined. Requires `can_tile`.
    """
    rows, inner, inputs = len(order.pairs), weight.shape[1] // 2, weight.shape[2]
    act = x.new_empty((rows, inner))
    scale = torch.empty((inner // _BLOCK, rows), dtype=torch.float32, device=x.device).t()
    across = inner // _BLOCK
    boxes = _boxes(weight, _BLOCK), _boxes(act, ROWS // 2)
    tensors = (x, *boxes, x_scale, w_scale, scale, order.pairs, order.experts, order.used, order.counts)
    numbers = pairs, x.stride(0), x_scale.stride(1), rows, inner, across, inputs // _BLOCK
    _prepared_gate_up(top, x.device)(make_grid(order, across, x.device), tensors, numbers)
    return act, scale


def compute_down(
    act: torch.Tensor,
    act_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    pair_weights: torch.Tensor,
    order: Alignment,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`compute_gate_up`'s result times `weight` [experts, hidden, inner] -> [pairs, hidden], each
    row times its pair's weight (float32)."""
    hidden, inputs = weight.shape[1:]
    out = torch.empty((pair_weights.numel(), hidden), dtype=dtype, device=act.device)
    across = hidden // (2 * _BLOCK)
    boxes = _boxes(act, ROWS), _boxes(weight, 2 * _BLOCK), _lines(act_scale.t())
    tensors = (*boxes, out, w_scale, pair_weights, order.pairs, order.experts, order.used, order.counts)
    _prepared_down(dtype, act.device)(make_grid(order, across, act.device), tensors, (len(out), across, inputs // _BLOCK))
    return out


def _boxes(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    return make_boxes(tensor, rows, _BLOCK, _LAYOUT)


def _lines(scale: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(scale, list(scale.shape), [scale.stride(0), 1], [1, ROWS], _SCALE_LAYOUT)


@lru_cache(maxsize=64)
def _prepared_gate_up(top: int, device: torch.device) -> PreparedLaunch:
    whole = torch.empty((256, 256), dtype=torch.float8_e4m3fn, device=device)
    example = whole.dtype, _boxes(whole, _BLOCK), _boxes(whole, ROWS // 2), *[torch.float32] * 3, *[torch.int32] * 4, *[0] * 7
    constants = {"TOP": top, "STAGES": _STAGES, "REGISTERS": _GATE_UP_REGISTERS[0], "FEW_REGISTERS": _GATE_UP_REGISTERS[1]}
    return PreparedLaunch(gate_up_fp8_kernel, example, constants, device, 4)


@lru_cache(maxsize=64)
def _prepared_down(dtype: torch.dtype, device: torch.device) -> PreparedLaunch:
    whole = torch.empty((256, 256), dtype=torch.float8_e4m3fn, device=device)
    boxes = _boxes(whole, ROWS), _boxes(whole, 2 * _BLOCK), _lines(torch.empty((256, 256), device=device))
    example = *boxes, dtype, *[torch.float32] * 2, *[torch.int32] * 4, *[0] * 3
    constants = {"STAGES": _STAGES, "REGISTERS": _DOWN_REGISTERS[0], "FEW_REGISTERS": _DOWN_REGISTERS[1]}
    return PreparedLaunch(down_fp8_kernel, example, constants, device, 4)


@gluon.jit
def multiply_scaled_items(shared, item, steps, left_scales, right_scales, CONSUMER: gl.constexpr):
    """Scaled sums of x_tile @ w_tile.T over `steps` items, starting at `item` -> two float32 [64,
    128]: the halves of the outputs.

    Computed by one consumer group (four warps) for its 64 rows; CONSUMER is 0 or 1. `left_scales`
    and `right_scales`: pointers to the scales of the halves' weights. While one group adds, the
    other one multiplies. The rows' scales come from shared memory: the compiler copies registers
    that were loaded ahead between two MMA instructions, which then wait for the load.
    """
    x, w, _, ready, free, _, _, _, row_scales = shared
    STAGES: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    left = gl.zeros([64, 128], gl.float32, layout)
    right = gl.zeros([64, 128], gl.float32, layout)
    zeros = gl.zeros([64, 128], gl.float32, layout)
    for k in range(steps):
        stage = item % STAGES
        by_left, by_right = gl.load(left_scales + k), gl.load(right_scales + k)
        mbarrier.wait(ready.index(stage), item // STAGES & 1)
        rows = x.index(stage * 2 + CONSUMER)
        sums = warpgroup_mma(rows, w.index(stage * 2).permute((1, 0)), zeros, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        row = row_scales.index(stage * 2 + CONSUMER).load(gl.SliceLayout(1, layout))
        left += sums * (row * by_left)[:, None]
        sums = warpgroup_mma(rows, w.index(stage * 2 + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(free.index(stage), count=1)
        right += sums * (row * by_right)[:, None]
        item += 1
    return left, right


@gluon.jit
def look_up_tile(tile, total, across, pairs_of, experts_of, CONSUMER: gl.constexpr):
    """(block of rows, first pair of the group's rows, expert) of a tile; after the last tile, of
    that one."""
    block = min(tile, total - 1) // across
    return block, gl.load(pairs_of + block * 128 + CONSUMER * 64), gl.load(experts_of + block)


@gluon.jit
def consume_gate_up(tensors, shared, sizes, CONSUMER: gl.constexpr):
    """A consumer group (four warps) of the first GEMM: 64 rows of each tile times gate and up,
    the activation, and its rounding to float8 with one scale per row."""
    out, w_scale, out_scale, pairs_of, experts_of, used = tensors
    num_pairs, scale_stride, across, steps = sizes
    _, _, results, ready, free, tile_queue, tile_ready, store_turn, _ = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    total = gl.load(used) * across
    item = 0
    number = 0
    tile = gl.program_id(0)
    block, next_pair, next_expert = look_up_tile(tile, total, across, pairs_of, experts_of, CONSUMER)
    while tile < total:
        column, start, pair = tile % across, block * 128 + CONSUMER * 64, next_pair
        gates = w_scale + (next_expert.to(gl.int64) * (2 * across) + column) * steps
        tile = receive_tile(tile_queue, tile_ready, number)
        block, next_pair, next_expert = look_up_tile(tile, total, across, pairs_of, experts_of, CONSUMER)
        if pair < num_pairs:
            gate, up = multiply_scaled_items(shared, item, steps, gates, gates + across * steps, CONSUMER)
            wait_for_store_turn(store_turn, number, CONSUMER)
            act = gate / (1.0 + gl.exp(-gate)) * up
            scale = gl.maximum(gl.max(gl.abs(act), 1) / 448.0, 1e-12)
            gl.store(out_scale + column * scale_stride + start + rows, scale)
            tma.store_wait(0)
            results.index(CONSUMER).store((act * (1.0 / scale)[:, None]).to(gl.float8e4nv))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [start, column * 128], results.index(CONSUMER))
        else:
            skip_items(ready, free, item, steps)
        signal_store_turn(store_turn, number, CONSUMER)
        number += 1
        item += steps
    tma.store_wait(0)


@gluon.jit
def consume_down(tensors, shared, sizes, CONSUMER: gl.constexpr):
    """A consumer group (four warps) of the second GEMM: 64 rows of each tile, times the pairs'
    weights, scattered to the pairs' rows."""
    out, w_scale, pair_weights, pairs_of, experts_of, used = tensors
    num_pairs, across, steps = sizes
    _, _, results, ready, free, tile_queue, tile_ready, store_turn, _ = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    columns = gl.arange(0, 128, gl.SliceLayout(0, lines))
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    lined = gl.arange(0, 64, gl.SliceLayout(1, lines))
    total = gl.load(used) * across
    item = 0
    number = 0
    tile = gl.program_id(0)
    block, next_pair, next_expert = look_up_tile(tile, total, across, pairs_of, experts_of, CONSUMER)
    while tile < total:
        column, start, pair = tile % across, block * 128 + CONSUMER * 64, next_pair
        scales = w_scale + (next_expert.to(gl.int64) * across + column) * 2 * steps
        tile = receive_tile(tile_queue, tile_ready, number)
        block, next_pair, next_expert = look_up_tile(tile, total, across, pairs_of, experts_of, CONSUMER)
        if pair < num_pairs:
            left, right = multiply_scaled_items(shared, item, steps, scales, scales + steps, CONSUMER)
            wait_for_store_turn(store_turn, number, CONSUMER)
            pairs = gl.load(pairs_of + start + rows)
            weight = gl.load(pair_weights + pairs, mask=pairs < num_pairs, other=0.0)[:, None]
            places = gl.load(pairs_of + start + lined)
            inside = (places < num_pairs)[:, None]
            targets = out + places.to(gl.int64)[:, None] * (across * 256) + (column * 256 + columns)[None, :]
            left, right = (left * weight).to(results.dtype), (right * weight).to(results.dtype)
            scatter_halves(results.index(CONSUMER), left, right, targets, inside, lines)
        else:
            skip_items(ready, free, item, steps)
        signal_store_turn(store_turn, number, CONSUMER)
        number += 1
        item += steps


@gluon.jit
def allocate_row_scales(STAGES: gl.constexpr):
    """The scales of the rows of each item."""
    return gl.allocate_shared_memory(gl.float32, [STAGES * 2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit(do_not_specialize=["num_pairs", "stride", "x_step", "out_step", "inner", "across", "steps"])
def gate_up_fp8_kernel(
    source,  # [tokens, hidden]
    weights,  # TMA descriptor of [experts * 2 * inner, hidden], box [128, 128]
    out,  # TMA descriptor of [rows, inner], box [64, 128]
    x_scale,  # [hidden / 128, tokens]
    w_scale,  # [experts, 2 * inner / 128, hidden / 128]
    out_scale,  # [inner / 128, rows]
    pairs_of, experts_of, used,
    counts,  # zeros before and after
    num_pairs,
    stride,  # stride of tokens
    x_step,  # stride of blocks of inputs in `x_scale`
    out_step,  # and in `out_scale`
    inner,
    across,  # output tiles
    steps,  # pipeline items per tile
    TOP: gl.constexpr,
    STAGES: gl.constexpr,  # pipeline stages
    REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: min(multiprocessors, blocks * output tiles). As `expert_prefill.gate_up_kernel`."""
    results = gl.allocate_shared_memory(out.dtype, [2, 64, 128], out.layout)
    shared = allocate_pipeline(weights, results, STAGES, 2) + (allocate_row_scales(STAGES),)  # noqa: RUF005 - Gluon has no unpacking
    wait_for_previous(PDL)
    launch_dependents(PDL)
    consumed = out, w_scale, out_scale, pairs_of, experts_of, used
    sizes = num_pairs, out_step, across, steps
    produced = source, x_scale, weights, pairs_of, experts_of, used, counts
    gl.warp_specialize(
        [
            (consume_gate_up, (consumed, shared, sizes, 0)),
            (consume_gate_up, (consumed, shared, sizes, 1)),
            (produce_gate_up, (produced, shared, (num_pairs, stride, x_step, inner, across, steps), TOP, True)),
        ],
        [4, 4],
        [REGISTERS, FEW_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_pairs", "across", "steps"])
def down_fp8_kernel(
    acts,  # TMA descriptor of [rows, inner], box [128, 128]
    weights,  # TMA descriptor of [experts * hidden, inner], box [256, 128]
    act_scale,  # TMA descriptor of [inner / 128, rows], box [1, 128]
    out,  # [pairs, hidden]
    w_scale,  # [experts, hidden / 128, inner / 128]
    pair_weights, pairs_of, experts_of, used,
    counts,  # zeros before and after
    num_pairs,
    across,  # output tiles
    steps,  # pipeline items per tile
    STAGES: gl.constexpr,  # pipeline stages
    REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: min(multiprocessors, blocks * output tiles). As `expert_prefill.down_kernel`."""
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    results = gl.allocate_shared_memory(out.dtype.element_ty, [2, 64, 128], half)
    shared = allocate_pipeline(weights, results, STAGES, 1) + (allocate_row_scales(STAGES),)  # noqa: RUF005 - Gluon has no unpacking
    wait_for_previous(PDL)
    launch_dependents(PDL)
    consumed = out, w_scale, pair_weights, pairs_of, experts_of, used
    sizes = num_pairs, across, steps
    gl.warp_specialize(
        [
            (consume_down, (consumed, shared, sizes, 0)),
            (consume_down, (consumed, shared, sizes, 1)),
            (produce_down, ((acts, act_scale, weights, experts_of, used, counts), shared, across, steps, True)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
