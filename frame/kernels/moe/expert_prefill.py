# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Grouped GEMM of experts with many rows, for compute capability 9.0 (Gluon, warp-specialized,
persistent).

act = SiLU(x @ gate[e].T) * (x @ up[e].T), then out = (act @ down[e].T) * weight, for rows sorted by
expert. Does not run under Triton's interpreter. Depends on no routing; `expert_tiles` decides for
which row counts it is used.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from frame.kernels.gluon_pipeline import allocate_barriers, multiply_items, view
from frame.kernels.launch import PreparedLaunch, count_tma_processors, launch_dependents, wait_for_previous
from frame.kernels.moe.align import Alignment

ROWS = 128  # rows per tile, and per block of the alignment
_OUTPUTS, _INPUTS = 256, 64  # outputs per tile (half of them gates in the first GEMM); inputs per pipeline item
_STAGES = 4  # pipeline stages, 48 KiB each
_GATE_UP_REGISTERS, _DOWN_REGISTERS = (224, 56), (240, 24)  # registers per consumer thread, and per producer thread
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def can_tile(outputs: int, inputs: int) -> bool:
    """Whether whole tiles cover weights [experts, outputs, inputs]. The outputs of the first
    GEMM are gates and ups together."""
    return outputs % _OUTPUTS == 0 and inputs % _INPUTS == 0


def compute_gate_up(x: torch.Tensor, weight: torch.Tensor, pairs: int, top: int, order: Alignment) -> torch.Tensor:
    """SiLU(gate) * up [rows of the alignment, inner] of x [tokens, hidden] and `weight` [experts, 2
    * inner, hidden], gates first.

    bfloat16 or float16; contiguous weights; rows of x 16-byte aligned. Sums and activation are
    float32 and rounded once. `order` has blocks of `ROWS` rows, `pairs` pairs in all, `top` per
    token. Results of padding rows are undefined. Requires `can_tile`.
    """
    inner, inputs = weight.shape[1] // 2, weight.shape[2]
    act = x.new_empty((len(order.pairs), inner))
    across = inner // (_OUTPUTS // 2)
    boxes = make_boxes(weight, _OUTPUTS // 2, _INPUTS), make_boxes(act, 64, _OUTPUTS // 2)
    tensors = (x, *boxes, order.pairs, order.experts, order.used, order.counts)
    launch = _prepared_gate_up(top, x.dtype, x.device)
    launch(make_grid(order, across, x.device), tensors, (pairs, x.stride(0), inner, across, inputs // _INPUTS))
    return act


def compute_down(act: torch.Tensor, weight: torch.Tensor, pair_weights: torch.Tensor, order: Alignment) -> torch.Tensor:
    """`compute_gate_up`'s result times `weight` [experts, hidden, inner] -> [pairs, hidden], each
    row times its pair's weight (float32)."""
    hidden, inputs = weight.shape[1:]
    out = act.new_empty((pair_weights.numel(), hidden))
    across = hidden // _OUTPUTS
    boxes = make_boxes(act, ROWS, _INPUTS), make_boxes(weight, _OUTPUTS, _INPUTS)
    tensors = (*boxes, out, pair_weights, order.pairs, order.experts, order.used, order.counts)
    _prepared_down(act.dtype, act.device)(make_grid(order, across, act.device), tensors, (len(out), across, inputs // _INPUTS))
    return out


def make_boxes(tensor: torch.Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout = _LAYOUT) -> TensorDescriptor:
    """A TMA descriptor of a contiguous tensor, its leading dimensions as one, in boxes of [rows,
    columns]."""
    size = tensor.shape[-1]
    return TensorDescriptor(tensor, [tensor.numel() // size, size], [size, 1], [rows, columns], layout)


def make_grid(order: Alignment, across: int, device: torch.device) -> tuple[int, int, int]:
    """One program for each multiprocessor or output tile, whichever are fewer."""
    return min(count_tma_processors(device), len(order.experts) * across), 1, 1


@lru_cache(maxsize=64)
def _prepared_gate_up(top: int, dtype: torch.dtype, device: torch.device) -> PreparedLaunch:
    whole = torch.empty((256, 256), dtype=dtype, device=device)
    boxes = make_boxes(whole, _OUTPUTS // 2, _INPUTS), make_boxes(whole, 64, _OUTPUTS // 2)
    constants = {"TOP": top, "STAGES": _STAGES, "REGISTERS": _GATE_UP_REGISTERS[0], "FEW_REGISTERS": _GATE_UP_REGISTERS[1]}
    return PreparedLaunch(gate_up_kernel, (dtype, *boxes, *[torch.int32] * 4, *[0] * 5), constants, device, 4)


@lru_cache(maxsize=64)
def _prepared_down(dtype: torch.dtype, device: torch.device) -> PreparedLaunch:
    whole = torch.empty((256, 256), dtype=dtype, device=device)
    boxes = make_boxes(whole, ROWS, _INPUTS), make_boxes(whole, _OUTPUTS, _INPUTS)
    constants = {"STAGES": _STAGES, "REGISTERS": _DOWN_REGISTERS[0], "FEW_REGISTERS": _DOWN_REGISTERS[1]}
    return PreparedLaunch(down_kernel, (*boxes, dtype, torch.float32, *[torch.int32] * 4, *[0] * 3), constants, device, 4)


@gluon.jit
def claim_tile(tile_queue, tile_ready, counts, number, WARPS: gl.constexpr):
    """Claim the program's next tile from the global counter and publish it to the consumers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tile = gl.num_programs(0) + gl.atomic_add(counts, 1, sem="relaxed")
    slot = number % tile_queue.shape[0]
    tile_queue.index(slot).store(gl.full([1], tile, gl.int32, layout))
    mbarrier.arrive(tile_ready.index(slot), count=1)
    return tile


@gluon.jit
def receive_tile(tile_queue, tile_ready, number):
    """The tile that `claim_tile` published."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = number % tile_queue.shape[0]
    mbarrier.wait(tile_ready.index(slot), number // tile_queue.shape[0] & 1)
    return gl.sum(tile_queue.index(slot).load(layout), 0)


@gluon.jit
def reset_counters(counts):
    """The last program resets the counters to zero."""
    if gl.atomic_add(counts + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counts, 0)
        gl.store(counts + 1, 0)


@gluon.jit
def wait_for_store_turn(store_turn, number, CONSUMER: gl.constexpr):
    """The second consumer group stores a tile's results after the first has, and multiplies
    meanwhile."""
    if CONSUMER == 1:
        mbarrier.wait(store_turn.index(number % store_turn.shape[0]), number // store_turn.shape[0] & 1)


@gluon.jit
def signal_store_turn(store_turn, number, CONSUMER: gl.constexpr):
    """The first consumer group is done with a tile."""
    if CONSUMER == 0:
        mbarrier.arrive(store_turn.index(number % store_turn.shape[0]), count=1)


@gluon.jit
def skip_items(ready, free, item, steps):
    """Release a tile's pipeline items without multiplying."""
    STAGES: gl.constexpr = ready.shape[0]
    for _ in range(steps):
        mbarrier.wait(ready.index(item % STAGES), item // STAGES & 1)
        mbarrier.arrive(free.index(item % STAGES), count=1)
        item += 1


@gluon.jit
def view_lines(row_scales, place):
    """The scales of the 128 rows of two places."""
    return row_scales.index(place)._reinterpret(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001 - as in `view`


@gluon.jit
def produce_gate_up(tensors, shared, sizes, TOP: gl.constexpr, SCALED: gl.constexpr):
    """The four producer warps of the first GEMM: gather each item's rows, with their scales if
    SCALED, and load its weights by TMA.

    The rows of the next tile are looked up while this tile is copied; an item is handed over when
    the next item's copies have started.
    """
    source, x_scale, weights, pairs_of, experts_of, used, counts = tensors
    num_pairs, stride, scale_stride, inner, across, steps = sizes
    x, w, _, ready, free, tile_queue, tile_ready, _ = shared[:8]
    STAGES: gl.constexpr = ready.shape[0]
    INPUTS: gl.constexpr = x.shape[2]
    EACH: gl.constexpr = 16 * 8 // source.dtype.element_ty.primitive_bitwidth  # elements of a copy of 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    columns = gl.arange(0, INPUTS, gl.SliceLayout(0, layout))
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    total = gl.load(used) * across
    item = 0
    number = 0
    tile = gl.program_id(0)
    block = min(tile, total - 1) // across
    next_pairs = gl.load(pairs_of + block * 128 + rows)
    if SCALED:
        next_lanes = gl.load(pairs_of + block * 128 + lanes)
    next_expert = gl.load(experts_of + block)
    while tile < total:
        first = next_expert * 2 * inner + tile % across * 128
        inside = next_pairs < num_pairs
        places = gl.multiple_of(gl.where(inside, next_pairs // TOP, 0).to(gl.int64) * stride, EACH)
        sources = source + places[:, None] + columns[None, :]
        if SCALED:
            scales = x_scale + gl.where(next_lanes < num_pairs, next_lanes // TOP, 0)
        tile = claim_tile(tile_queue, tile_ready, counts, number, 4)
        number += 1
        block = min(tile, total - 1) // across
        next_pairs = gl.load(pairs_of + block * 128 + rows)
        if SCALED:
            next_lanes = gl.load(pairs_of + block * 128 + lanes)
        next_expert = gl.load(experts_of + block)
        for k in range(steps):
            stage = item % STAGES
            mbarrier.wait(free.index(stage), (item // STAGES & 1) ^ 1)
            barrier = ready.index(stage)
            mbarrier.expect(barrier, 256 * 128)
            tma.async_copy_global_to_shared(weights, [first, k * INPUTS], barrier, w.index(stage * 2))
            tma.async_copy_global_to_shared(weights, [first + inner, k * INPUTS], barrier, w.index(stage * 2 + 1))
            async_copy.async_copy_global_to_shared(view(x, stage * 2, 128, INPUTS), sources + k * INPUTS, mask=inside[:, None])
            if SCALED:
                async_copy.async_copy_global_to_shared(view_lines(shared[8], stage * 2), scales + k * scale_stride)
            async_copy.commit_group()
            async_copy.wait_group(1)
            fence_async_shared()
            mbarrier.arrive(ready.index((item + STAGES - 1) % STAGES), count=1, pred=item > 0)
            item += 1
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(ready.index((item + STAGES - 1) % STAGES), count=1, pred=item > 0)
    reset_counters(counts)


@gluon.jit
def consume_gate_up(out, pairs_of, used, shared, num_pairs, across, steps, CONSUMER: gl.constexpr):
    """A consumer group (four warps) of the first GEMM: 64 rows of each tile times gate and up,
    then the activation."""
    x, w, results, ready, free, tile_queue, tile_ready, store_turn = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    total = gl.load(used) * across
    item = 0
    number = 0
    tile = gl.program_id(0)
    start = min(tile, total - 1) // across * 128 + CONSUMER * 64
    pair = gl.load(pairs_of + start)
    while tile < total:
        first = tile % across * 128
        tile = receive_tile(tile_queue, tile_ready, number)
        next_start = min(tile, total - 1) // across * 128 + CONSUMER * 64
        next_pair = gl.load(pairs_of + next_start)
        if pair < num_pairs:
            sums = multiply_items(x, w, ready, free, item, steps, CONSUMER)
            wait_for_store_turn(store_turn, number, CONSUMER)
            gate, up = sums.reshape([64, 2, 128]).permute((0, 2, 1)).split()
            gate = gl.convert_layout(gate, layout, assert_trivial=True)
            up = gl.convert_layout(up, layout, assert_trivial=True)
            tma.store_wait(0)
            results.index(CONSUMER).store((gate / (1.0 + gl.exp(-gate)) * up).to(w.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [start, first], results.index(CONSUMER))
        else:
            skip_items(ready, free, item, steps)
        signal_store_turn(store_turn, number, CONSUMER)
        number += 1
        item += steps
        start, pair = next_start, next_pair
    tma.store_wait(0)


@gluon.jit
def produce_down(tensors, shared, across, steps, SCALED: gl.constexpr):
    """The producer warp of the second GEMM: load the TMA boxes of all items in turn, each when its
    stage is free."""
    acts, act_scale, weights, experts_of, used, counts = tensors
    x, w, _, ready, free, tile_queue, tile_ready, _ = shared[:8]
    STAGES: gl.constexpr = ready.shape[0]
    INPUTS: gl.constexpr = x.shape[2]
    total = gl.load(used) * across
    item = 0
    number = 0
    tile = gl.program_id(0)
    block = min(tile, total - 1) // across
    next_expert = gl.load(experts_of + block)
    while tile < total:
        start, first = block * 128, (next_expert * across + tile % across) * 256
        tile = claim_tile(tile_queue, tile_ready, counts, number, 1)
        number += 1
        block = min(tile, total - 1) // across
        next_expert = gl.load(experts_of + block)
        for k in range(steps):
            stage = item % STAGES
            mbarrier.wait(free.index(stage), (item // STAGES & 1) ^ 1)
            barrier = ready.index(stage)
            mbarrier.expect(barrier, (128 + 256) * 128 + (4 * 128 if SCALED else 0))
            if SCALED:
                lines = shared[8].index(stage * 2)._reinterpret(gl.float32, [1, 128], act_scale.layout)  # noqa: SLF001 - as in `view`
                tma.async_copy_global_to_shared(act_scale, [k, start], barrier, lines)
            tma.async_copy_global_to_shared(acts, [start, k * INPUTS], barrier, view(x, stage * 2, 128, INPUTS))
            tma.async_copy_global_to_shared(weights, [first, k * INPUTS], barrier, view(w, stage * 2, 256, INPUTS))
            item += 1
    reset_counters(counts)


@gluon.jit
def scatter_halves(results, left, right, targets, inside, LINES: gl.constexpr):
    """Store the two halves of the columns of a tile, by way of `results` in shared memory."""
    results.store(left)
    gl.store(targets, results.load(LINES), mask=inside)
    results.store(right)
    gl.store(targets + 128, results.load(LINES), mask=inside)


@gluon.jit
def consume_down(out, pair_weights, pairs_of, used, shared, num_pairs, across, steps, CONSUMER: gl.constexpr):
    """A consumer group (four warps) of the second GEMM: 64 rows of each tile, times the pairs'
    weights, scattered to the pairs' rows."""
    x, w, results, ready, free, tile_queue, tile_ready, store_turn = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    columns = gl.arange(0, 128, gl.SliceLayout(0, lines))
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    lined = gl.arange(0, 64, gl.SliceLayout(1, lines))
    total = gl.load(used) * across
    item = 0
    number = 0
    tile = gl.program_id(0)
    start = min(tile, total - 1) // across * 128 + CONSUMER * 64
    next_pair = gl.load(pairs_of + start)
    next_pairs = gl.load(pairs_of + start + rows)
    while tile < total:
        first, pair, pairs = tile % across * 256, next_pair, next_pairs
        places = gl.load(pairs_of + start + lined)
        weight = gl.load(pair_weights + pairs, mask=pairs < num_pairs, other=0.0)
        tile = receive_tile(tile_queue, tile_ready, number)
        start = min(tile, total - 1) // across * 128 + CONSUMER * 64
        next_pair = gl.load(pairs_of + start)
        next_pairs = gl.load(pairs_of + start + rows)
        if pair < num_pairs:
            sums = multiply_items(x, w, ready, free, item, steps, CONSUMER)
            wait_for_store_turn(store_turn, number, CONSUMER)
            sums *= weight[:, None]
            inside = (places < num_pairs)[:, None]
            targets = out + places.to(gl.int64)[:, None] * (across * 256) + (first + columns)[None, :]
            left, right = sums.to(w.dtype).reshape([64, 2, 128]).permute((0, 2, 1)).split()
            left = gl.convert_layout(left, half_layout, assert_trivial=True)
            right = gl.convert_layout(right, half_layout, assert_trivial=True)
            scatter_halves(results.index(CONSUMER), left, right, targets, inside, lines)
        else:
            skip_items(ready, free, item, steps)
        signal_store_turn(store_turn, number, CONSUMER)
        number += 1
        item += steps


@gluon.jit
def allocate_pipeline(boxes, results, STAGES: gl.constexpr, PRODUCERS: gl.constexpr):
    """A program's shared memory: items `x` and `w`, `results` of each group, and barriers.

    An item is ready after PRODUCERS arrivals. The tile queue has twice as many slots as the
    pipeline has stages, so that no slot is reused before both groups have read it.
    """
    x = gl.allocate_shared_memory(boxes.dtype, [STAGES * 2, 64, boxes.block_shape[1]], boxes.layout)
    w = gl.allocate_shared_memory(boxes.dtype, [STAGES * 2, 128, boxes.block_shape[1]], boxes.layout)
    ready, free = allocate_barriers(STAGES, PRODUCERS, 2)
    tile_queue = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    tile_ready = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    store_turn = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * 2):
        mbarrier.init(tile_ready.index(i), count=1)
        mbarrier.init(store_turn.index(i), count=1)
    fence_async_shared()
    return x, w, results, ready, free, tile_queue, tile_ready, store_turn


@gluon.jit(do_not_specialize=["num_pairs", "stride", "inner", "across", "steps"])
def gate_up_kernel(
    source,  # [tokens, hidden]
    weights,  # TMA descriptor of [experts * 2 * inner, hidden], box [128, 64]
    out,  # TMA descriptor of [rows, inner], box [64, 128]
    pairs_of, experts_of, used,
    counts,  # zeros before and after
    num_pairs,
    stride,  # stride of tokens
    inner,
    across,  # output tiles
    steps,  # pipeline items per tile
    TOP: gl.constexpr,
    STAGES: gl.constexpr,  # pipeline stages
    REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: min(multiprocessors, blocks * output tiles).

    Four producer warps gather token rows with 16-byte asynchronous copies and keep the
    shared-memory pipeline full. Two consumer groups of four warps multiply 64 rows and 256 outputs
    each; one multiplies while the other stores (CUTLASS's and FlashAttention-3's "pingpong"
    schedule). Tiles differ in cost, since a group whose rows are all padding multiplies nothing, so
    programs claim tiles from one atomic counter.
    """
    results = gl.allocate_shared_memory(weights.dtype, [2, 64, 128], weights.layout)
    shared = allocate_pipeline(weights, results, STAGES, 2)
    produced = source, source, weights, pairs_of, experts_of, used, counts  # no scales
    wait_for_previous(PDL)
    launch_dependents(PDL)
    gl.warp_specialize(
        [
            (consume_gate_up, (out, pairs_of, used, shared, num_pairs, across, steps, 0)),
            (consume_gate_up, (out, pairs_of, used, shared, num_pairs, across, steps, 1)),
            (produce_gate_up, (produced, shared, (num_pairs, stride, 0, inner, across, steps), TOP, False)),
        ],
        [4, 4],
        [REGISTERS, FEW_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_pairs", "across", "steps"])
def down_kernel(
    acts,  # TMA descriptor of [rows, inner], box [128, 64]
    weights,  # TMA descriptor of [experts * hidden, inner], box [256, 64]
    out,  # [pairs, hidden]
    pair_weights, pairs_of, experts_of, used,
    counts,  # zeros before and after
    num_pairs,
    across,  # output tiles
    steps,  # pipeline items per tile
    STAGES: gl.constexpr,  # pipeline stages
    REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: min(multiprocessors, blocks * output tiles). As `gate_up_kernel`, with one producer
    warp that loads by TMA; results are scattered to the pairs' rows."""
    results = gl.allocate_shared_memory(weights.dtype, [2, 64, 128], weights.layout)
    shared = allocate_pipeline(weights, results, STAGES, 1)
    produced = acts, acts, weights, experts_of, used, counts  # no scales
    wait_for_previous(PDL)
    launch_dependents(PDL)
    gl.warp_specialize(
        [
            (consume_down, (out, pair_weights, pairs_of, used, shared, num_pairs, across, steps, 0)),
            (consume_down, (out, pair_weights, pairs_of, used, shared, num_pairs, across, steps, 1)),
            (produce_down, (produced, shared, across, steps, False)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
