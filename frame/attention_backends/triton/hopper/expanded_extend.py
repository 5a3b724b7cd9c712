# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Causal attention of expanded latents for long prompts, for compute capability 9.0 (Gluon,
warp-specialized, persistent).

Keys of 128 + 64 columns and values of 128, of which each head has its own, side by side: what a
latent layer (DeepSeek) expands for its prompts. As FlashAttention-3 (arXiv 2407.08608), one
producer warp loads by TMA, and two consumer groups multiply in turns, so that one multiplies while
the other computes its softmax. Does not run under Triton's interpreter. Depends on no layer;
`extend_launch` uses it where `can_run` holds.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from frame.attention_backends.triton.operands import Operands
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels.gluon_pipeline import allocate_barriers
from frame.kernels.launch import PreparedLaunch, count_tma_processors, launch_dependents, wait_for_previous

QUERIES = 128  # queries of a tile; a consumer group has half of them
_KEYS = 128  # keys of an item
_WIDTHS = 128, 64, 128  # columns of both key parts and of the values
_STAGES = 2  # items of keys, 48 KiB each, and of values, 32 KiB each
_REGISTERS, _FEW_REGISTERS = 232, 40  # registers per consumer thread, and per producer thread
_LOG2E = 1.4426950408889634
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def can_run(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether the kernel computes this layer: expanded latents whose heads have keys of their own,
    causal, without window, soft cap or sinks. `operands.can_use_tma` and `is_aligned` must hold
    too, and `frame.kernels.supports_tma_streaming`."""
    if operands.k2 is None or operands.v is None or operands.q2 is None or not operands.has_all_keys or operands.group != 1:
        return False
    is_plain = spec.causal and not (spec.sliding_window or spec.soft_cap or spec.sinks is not None)
    widths = operands.k1.shape[2], operands.k2.shape[2], operands.v.shape[2]
    queries = [piece for piece in operands[:2] if piece is not None]
    aligned = all(piece.data_ptr() % 16 == 0 and piece.stride(0) % 8 == piece.stride(1) % 8 == 0 for piece in queries)
    return is_plain and widths == _WIDTHS and aligned


def attend_prompts(
    operands: Operands,
    out: torch.Tensor,
    tiles: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    first_row: int,
    scale: float,
) -> None:
    """Write the attention of all extend rows to `out` [tokens, heads, 128].

    `tiles` int32 [2, tiles]: extend row and first query of each tile of `QUERIES` queries, tiles
    with most keys first. `rows`: query_starts int32, seq_lens int32 and the start of each extend
    row among the keys, int32; `first_row`: the first extend row. `scale` of the scores.
    """
    q1, q2, k1, k2, v = (piece for piece in operands[:5] if piece is not None)
    boxes = _boxes(q1, QUERIES // 2), _boxes(q2, QUERIES // 2), _boxes(k1, _KEYS), _boxes(k2, _KEYS), _boxes(v, _KEYS)
    heads, count = q1.shape[1], tiles.shape[1]
    columns = q1.stride(1), q2.stride(1), k1.stride(1), k2.stride(1), v.stride(1)
    numbers = (count, first_row, heads, *columns, out.stride(0), out.stride(1), scale * _LOG2E)
    grid = min(count_tma_processors(out.device), heads * count), 1, 1
    prepare(out.dtype, out.device)(grid, (*boxes, out, tiles, *rows), numbers)


def _boxes(piece: torch.Tensor, rows: int) -> TensorDescriptor:
    """[rows, columns of all heads] in boxes of one head."""
    width = piece.shape[2]
    columns = (piece.shape[1] - 1) * piece.stride(1) + width
    return TensorDescriptor(piece, [piece.shape[0], columns], [piece.stride(0), 1], [rows, width], _LAYOUT)


@lru_cache(maxsize=16)
def prepare(dtype: torch.dtype, device: torch.device) -> PreparedLaunch:
    """The compiled kernel for queries, keys and values of `dtype`."""
    rows = QUERIES // 2, QUERIES // 2, _KEYS, _KEYS, _KEYS
    sizes = zip((*_WIDTHS[:2], *_WIDTHS), rows, strict=True)
    boxes = [_boxes(torch.empty((256, 1, width), dtype=dtype, device=device), count) for width, count in sizes]
    constants = {"STAGES": _STAGES, "REGISTERS": _REGISTERS, "FEW_REGISTERS": _FEW_REGISTERS}
    return PreparedLaunch(expanded_extend_kernel, (*boxes, dtype, *[torch.int32] * 4, *[0] * 10, 0.5), constants, device, 4)


@gluon.jit
def locate_tile(number, rows, sizes):
    """Tile number -> (head, first token, its query number, queries and keys of its row, start of
    the row's keys, items of keys)."""
    tiles, query_starts, seq_lens, key_starts = rows
    num_tiles, first_row, heads = sizes
    tile = number // heads
    extend = gl.load(tiles + tile)
    first = gl.load(tiles + num_tiles + tile)
    row = first_row + extend
    token_start = gl.load(query_starts + row)
    query_len = gl.load(query_starts + row + 1) - token_start
    seq_len = gl.load(seq_lens + row)
    end = min(seq_len, seq_len - query_len + first + 128)
    return number % heads, token_start + first, first, query_len, seq_len, gl.load(key_starts + extend), (end + 127) // 128


@gluon.jit
def produce(boxes, shared, rows, sizes, columns):
    """The producer warp: load each tile's queries, and its keys and values item by item, by TMA."""
    q1_boxes, q2_boxes, k1_boxes, k2_boxes, v_boxes = boxes
    q1_head, q2_head, k1_head, k2_head, v_head = columns
    q1, q2, k1, k2, v, ready_q, free_q, ready_k, free_k, ready_v, free_v, _turns = shared
    STAGES: gl.constexpr = ready_k.shape[0]
    item = 0
    programs = gl.num_programs(0)
    for number in range(gl.program_id(0), sizes[0] * sizes[2], programs):
        head, token, _, _, _, start, items = locate_tile(number, rows, sizes)
        mbarrier.wait(free_q.index(0), (number // programs & 1) ^ 1)
        mbarrier.expect(ready_q.index(0), 128 * (128 + 64) * 2)
        for piece in gl.static_range(2):
            tma.async_copy_global_to_shared(q1_boxes, [token + piece * 64, head * q1_head], ready_q.index(0), q1.index(piece))
            tma.async_copy_global_to_shared(q2_boxes, [token + piece * 64, head * q2_head], ready_q.index(0), q2.index(piece))
        for k in range(items):
            stage = item % STAGES
            parity = (item // STAGES & 1) ^ 1
            mbarrier.wait(free_k.index(stage), parity)
            mbarrier.expect(ready_k.index(stage), 128 * (128 + 64) * 2)
            tma.async_copy_global_to_shared(k1_boxes, [start + k * 128, head * k1_head], ready_k.index(stage), k1.index(stage))
            tma.async_copy_global_to_shared(k2_boxes, [start + k * 128, head * k2_head], ready_k.index(stage), k2.index(stage))
            mbarrier.wait(free_v.index(stage), parity)
            mbarrier.expect(ready_v.index(stage), 128 * 128 * 2)
            tma.async_copy_global_to_shared(v_boxes, [start + k * 128, head * v_head], ready_v.index(stage), v.index(stage))
            item += 1


@gluon.jit
def begin_turn(turns, number, CONSUMER: gl.constexpr):
    """Wait until the other group has issued the products of its turn; `number` counts the turns."""
    mbarrier.wait(turns.index(CONSUMER), (number & 1) ^ (1 - CONSUMER))


@gluon.jit
def attend_items(state, shared, first, last, items, item, turn, position, seq_len, unit, MASKED: gl.constexpr, CONSUMER: gl.constexpr):
    """The items first … last - 1 of `items`: scores, softmax in base 2, and values. `item` counts
    the items of all tiles. `turn`: the group's turn in which it multiplies item 0's values, and
    item 1's scores. MASKED: some queries do not see all keys.

    A last item may end behind its row: its keys are masked, and its values set to zero, since those
    of another row may not be finite.
    """
    row_max, row_sum, acc = state
    q1, q2, k1, k2, v, _, free_q, ready_k, free_k, ready_v, free_v, turns = shared
    STAGES: gl.constexpr = ready_k.shape[0]
    layout: gl.constexpr = acc.type.layout
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    zeros = gl.zeros([64, 128], gl.float32, layout)
    for k in range(first, last):
        stage = (item + k) % STAGES
        parity = (item + k) // STAGES & 1
        mbarrier.wait(ready_k.index(stage), parity)
        scores = warpgroup_mma(q1.index(CONSUMER), k1.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma(q2.index(CONSUMER), k2.index(stage).permute((1, 0)), scores, is_async=True)
        mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(free_k.index(stage), count=1)
        mbarrier.arrive(free_q.index(0), count=1, pred=k == items - 1)
        if MASKED:
            keys = k * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout))
            scores = gl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(scores, 1) * unit)
        weights = gl.exp2(scores * unit - new_max[:, None])
        rescale = gl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + gl.sum(weights, 1)
        row_max = new_max
        acc = acc * rescale[:, None]
        left = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, layout, 2))
        mbarrier.wait(ready_v.index(stage), parity)
        if MASKED and k * 128 + 128 > seq_len:
            for piece in gl.static_range(4):
                values = v.index(stage).slice(piece * 32, 32)
                inside = k * 128 + piece * 32 + gl.arange(0, 32, gl.SliceLayout(1, lines)) < seq_len
                values.store(gl.where(inside[:, None], values.load(lines), 0.0))
            fence_async_shared()
            gl.thread_barrier()
        begin_turn(turns, turn + k, CONSUMER)
        acc = warpgroup_mma(left, v.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free_v.index(stage), count=1)
    return row_max, row_sum, acc


@gluon.jit
def consume(out, shared, rows, sizes, unit, strides, CONSUMER: gl.constexpr):
    """A consumer group (four warps): 64 queries of each tile."""
    out_stride, out_head = strides
    ready_q, turns = shared[5], shared[11]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    places = CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 128, gl.SliceLayout(0, layout))
    item = 0
    programs = gl.num_programs(0)
    for number in range(gl.program_id(0), sizes[0] * sizes[2], programs):
        head, token, first, query_len, seq_len, _, items = locate_tile(number, rows, sizes)
        position = seq_len - query_len + first + places
        whole = min(items, (seq_len - query_len + first + CONSUMER * 64 + 1) // 128)  # items that all queries see
        mbarrier.wait(ready_q.index(0), number // programs & 1)
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
        state = row_max, row_sum, gl.zeros([64, 128], gl.float32, layout)
        turn = item + number // programs
        begin_turn(turns, turn, CONSUMER)
        state = attend_items(state, shared, 0, whole, items, item, turn + 1, position, seq_len, unit, False, CONSUMER)
        state = attend_items(state, shared, whole, items, items, item, turn + 1, position, seq_len, unit, True, CONSUMER)
        mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        item += items
        inside = (first + places < query_len)[:, None]
        targets = out + (token + places).to(gl.int64)[:, None] * out_stride + (head * out_head + columns)[None, :]
        gl.store(targets, (state[2] * (1.0 / state[1])[:, None]).to(out.dtype.element_ty), mask=inside)


@gluon.jit(
    do_not_specialize=[
        "num_tiles", "first_row", "heads", "q1_head", "q2_head", "k1_head", "k2_head", "v_head", "out_stride", "out_head", "unit",
    ]
)  # fmt: skip
def expanded_extend_kernel(
    q1_boxes,  # TMA descriptors of [tokens, columns of all heads]; boxes of 64 queries, or 128 keys or values, of one head
    q2_boxes, k1_boxes, k2_boxes, v_boxes,
    out,  # [tokens, heads, 128]
    tiles, query_starts, seq_lens, key_starts, num_tiles, first_row, heads,
    q1_head,  # strides of heads
    q2_head, k1_head, k2_head, v_head, out_stride, out_head,
    unit,  # the scale of the scores times log2(e)
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: min(multiprocessors, heads * tiles). Programs take every so many-th tile, all heads of
    a tile first."""
    q1 = gl.allocate_shared_memory(q1_boxes.dtype, [2, 64, 128], q1_boxes.layout)
    q2 = gl.allocate_shared_memory(q1_boxes.dtype, [2, 64, 64], q2_boxes.layout)
    k1 = gl.allocate_shared_memory(q1_boxes.dtype, [STAGES, 128, 128], k1_boxes.layout)
    k2 = gl.allocate_shared_memory(q1_boxes.dtype, [STAGES, 128, 64], k2_boxes.layout)
    v = gl.allocate_shared_memory(q1_boxes.dtype, [STAGES, 128, 128], v_boxes.layout)
    ready_q, free_q = allocate_barriers(1, 1, 2)
    ready_k, free_k = allocate_barriers(STAGES, 1, 2)
    ready_v, free_v = allocate_barriers(STAGES, 1, 2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for piece in gl.static_range(2):
        mbarrier.init(turns.index(piece), count=1)
    shared = q1, q2, k1, k2, v, ready_q, free_q, ready_k, free_k, ready_v, free_v, turns
    fence_async_shared()
    boxes = q1_boxes, q2_boxes, k1_boxes, k2_boxes, v_boxes
    rows = tiles, query_starts, seq_lens, key_starts
    sizes = num_tiles, first_row, heads
    wait_for_previous(PDL)
    launch_dependents(PDL)
    gl.warp_specialize(
        [
            (consume, (out, shared, rows, sizes, unit, (out_stride, out_head), 0)),
            (consume, (out, shared, rows, sizes, unit, (out_stride, out_head), 1)),
            (produce, (boxes, shared, rows, sizes, (q1_head, q2_head, k1_head, k2_head, v_head))),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
