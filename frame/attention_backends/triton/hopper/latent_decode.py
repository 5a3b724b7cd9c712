# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Decode attention of latents with 64 query heads a program, for compute capability 9.0 (Gluon,
warp-specialized, persistent).

Keys of 512 + 64 columns, whose first 512 are the values (DeepSeek's absorbed form), over the items
of `split_schedule`. As in FlashMLA, the keys of a tile are read once, by TMA, for scores and
values. One consumer group computes scores and softmax, and both multiply half of the values'
columns. Does not run under Triton's interpreter. Depends on no layer; `decode_launch` uses it where
`can_run` holds.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from frame.attention_backends.triton.operands import Operands
from frame.attention_backends.triton.split_schedule import HEADER, ITEM, ROW, SplitConfig
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels.gluon_pipeline import allocate_barriers, view
from frame.kernels.launch import PreparedLaunch, launch_dependents, wait_for_previous

HEADS = 64  # query heads of a program
_WIDTHS = 512, 64  # columns of latents, which are the values too, and of rotated keys
_PAGE = 16  # keys of a TMA box; the page size is a multiple
_KEYS, _STAGES = 32, 4  # keys of a tile, 1,152 bytes each, and tiles in shared memory
_REGISTERS, _FEW_REGISTERS = 232, 40  # registers per consumer thread, and per producer thread
_LOG2E = 1.4426950408889634
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_QUERY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def can_run(spec: AttentionSpec, operands: Operands, split: SplitConfig) -> bool:
    """Whether the kernel computes this layer: a 16-bit cache of latents, blocks of 64 heads, rows
    of one token without shared prefixes, window, soft cap or sinks.
    `frame.kernels.supports_tma_streaming` must hold too."""
    q1, q2, k1, k2 = operands[:4]
    if q2 is None or k2 is None or operands.v is not None or operands.scales or (k1.shape[2], k2.shape[2]) != _WIDTHS:
        return False
    is_plain = not (spec.sliding_window or spec.soft_cap or spec.sinks is not None or split.tile_rows or split.tokens > 1)
    joined = k2.data_ptr() == k1.data_ptr() + _WIDTHS[0] * k1.element_size() and k1.stride(0) == k2.stride(0)
    shaped = k1.shape[1] == 1 and q1.shape[1] % HEADS == 0 and operands.page_size % _PAGE == 0 and k1.dtype == q1.dtype
    aligned = all(piece.stride(0) % 8 == piece.stride(1) % 8 == 0 for piece in (q1, q2)) and k1.stride(0) % 8 == 0
    return is_plain and joined and shaped and aligned and k1.element_size() == 2


def attend_latents(
    operands: Operands,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    split: SplitConfig,
    scale: float,
) -> None:
    """Write the attention of all decode rows to `out`, or to `partials` what `merge_kernel` merges.

    `tensors`: out [rows, heads, 512], contiguous; parts float32 [lines, 512] and weights float32
    [lines], see `decode_kernel`; the schedule; the page table int32 [slots, pages]. `scale` of the
    scores.
    """
    out, table = tensors[0], tensors[4]
    numbers = (table.stride(0), split.capacity, split.heads, operands.page_size, scale * _LOG2E)
    grid = split.shares * (split.heads // HEADS), 1, 1
    prepare(out.dtype, out.device)(grid, (*_make_boxes(operands), *tensors), numbers)


def _make_boxes(operands: Operands) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """TMA descriptors: queries in boxes of 64 columns of the heads of a program, keys in boxes of
    64 columns."""
    queries = [TensorDescriptor(q, list(q.shape), list(q.stride()), [1, HEADS, 64], _QUERY_LAYOUT) for q in operands[:2] if q is not None]
    shape, strides = [operands.k1.shape[0], sum(_WIDTHS)], [operands.k1.stride(0), 1]
    return queries[0], queries[1], TensorDescriptor(operands.k1, shape, strides, [_PAGE, 64], _LAYOUT)


@lru_cache(maxsize=16)
def prepare(dtype: torch.dtype, device: torch.device) -> PreparedLaunch:
    """The compiled kernel for queries and keys of `dtype`."""
    q1, q2, keys = (torch.empty((64, count, width), dtype=dtype, device=device) for count, width in ((HEADS, 512), (HEADS, 64), (1, 576)))
    boxes = _make_boxes(Operands(q1, q2, keys, None, None, _PAGE))
    types = dtype, torch.float32, torch.float32, torch.int32, torch.int32
    constants = {"KEYS": _KEYS, "STAGES": _STAGES, "REGISTERS": _REGISTERS, "FEW_REGISTERS": _FEW_REGISTERS}
    return PreparedLaunch(latent_decode_kernel, (*boxes, *types, *[0] * 4, 0.5), constants, device, 4)


@gluon.jit
def locate_share(schedule, capacity, blocks):
    """(first item, last item + 1, first head) of this program."""
    share = gl.program_id(0) // blocks
    firsts = schedule + HEADER + capacity * ROW + share * ITEM + 4
    shares = gl.load(schedule + 2)
    first = gl.load(firsts, mask=share < shares, other=0)
    return (
        first,
        gl.load(firsts + ITEM, mask=share + 1 < shares, other=gl.load(schedule, mask=share < shares, other=0)),
        gl.program_id(0) % blocks * 64,
    )


@gluon.jit
def locate_item(index, schedule, capacity):
    """(row, page-table row, first key, last key + 1) of an item."""
    item = schedule + HEADER + capacity * ROW + index * ITEM
    return gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)


@gluon.jit
def find_slots(table, first, end, page_size, COUNT: gl.constexpr):
    """The KV slots of COUNT times 16 keys from `first` on; of those behind the last key, the slots
    of the last 16 keys again."""
    slots = ()
    for piece in gl.static_range(COUNT):
        key = min(first + piece * 16, (end - 1) // 16 * 16)
        slots = slots + (gl.load(table + key // page_size) * page_size + key % page_size,)  # noqa: RUF005 - Gluon has no unpacking
    return slots


@gluon.jit
def view_query(q, piece, boxes):
    """64 columns of the queries as the box of a TMA copy."""
    return q.index(piece)._reinterpret(q.dtype, [1, 64, 64], boxes.layout)  # noqa: SLF001 - Gluon has no public function


@gluon.jit
def produce(boxes, shared, schedule, table, numbers):
    """The producer warp: load each item's queries, and its keys tile by tile, by TMA."""
    q1_boxes, q2_boxes, k_boxes = boxes
    q, k, p, _factors, ready_q, free_q, ready_k, free_k, _ready_p, _free_p = shared
    table_stride, capacity, blocks, page_size = numbers
    STAGES: gl.constexpr = ready_k.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    PAGES: gl.constexpr = KEYS // 16
    tile = 0
    first_item, last_item, head = locate_share(schedule, capacity, blocks)
    for index in range(first_item, last_item):
        row, slot, begin, end = locate_item(index, schedule, capacity)
        pages = table + slot.to(gl.int64) * table_stride
        slots = find_slots(pages, begin, end, page_size, PAGES)
        mbarrier.wait(free_q.index(0), (index - first_item & 1) ^ 1)
        mbarrier.expect(ready_q.index(0), 64 * 576 * 2)
        for piece in gl.static_range(8):
            tma.async_copy_global_to_shared(q1_boxes, [row, head, piece * 64], ready_q.index(0), view_query(q, piece, q1_boxes))
        tma.async_copy_global_to_shared(q2_boxes, [row, head, 0], ready_q.index(0), view_query(q, 8, q2_boxes))
        for first in range(begin, end, KEYS):
            next_slots = find_slots(pages, first + KEYS, end, page_size, PAGES)  # read while the stage is waited for
            stage = tile % STAGES
            mbarrier.wait(free_k.index(stage), (tile // STAGES & 1) ^ 1)
            mbarrier.expect(ready_k.index(stage), KEYS * 576 * 2)
            for piece in gl.static_range(9):
                for page in gl.static_range(PAGES):
                    target = k.index((stage * 9 + piece) * PAGES + page)
                    tma.async_copy_global_to_shared(k_boxes, [slots[page], piece * 64], ready_k.index(stage), target)
            slots = next_slots
            tile += 1


@gluon.jit
def score(q, k, stage, zeros):
    """Issue the products of the queries with a stage's keys."""
    KEYS: gl.constexpr = zeros.shape[1]
    first = stage * 9 * (KEYS // 16)
    scores = warpgroup_mma(view(q, 0, 64, 512), view(k, first, KEYS, 512).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(q.index(8), view(k, first + 8 * (KEYS // 16), KEYS, 64).permute((1, 0)), scores, is_async=True)


@gluon.jit
def attend_tiles(shared, results, schedule, numbers, unit):
    """The first consumer group: scores and softmax in base 2 of each tile, and the first 256
    columns of the values."""
    q, k, p, factors, ready_q, free_q, ready_k, free_k, ready_p, free_p = shared
    weights_pointer, NUM_HEADS = results[2], results[3]
    _, capacity, blocks, _ = numbers
    STAGES: gl.constexpr = ready_k.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    PAGES: gl.constexpr = KEYS // 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    zeros = gl.zeros([64, KEYS], gl.float32, layout)
    tile = 0
    hand = 0  # counts what was handed to the other group: each tile's weights, and each item's divisors
    first_item, last_item, head = locate_share(schedule, capacity, blocks)
    for index in range(first_item, last_item):
        row, _, begin, end = locate_item(index, schedule, capacity)
        is_whole = gl.load(schedule + HEADER + row * ROW + 1) == 1
        mbarrier.wait(ready_q.index(0), index - first_item & 1)
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
        acc = gl.zeros([64, 256], gl.float32, wide)
        mbarrier.wait(ready_k.index(tile % STAGES), tile // STAGES & 1)
        scores = warpgroup_mma_wait(0, deps=(score(q, k, tile % STAGES, zeros),))
        gl.thread_barrier()
        mbarrier.arrive(free_q.index(0), count=1, pred=begin + KEYS >= end)
        for first in range(begin, end, KEYS):
            stage = tile % STAGES
            # the next tile's scores, while this one's softmax is computed; after the last tile, of
            # an incomplete stage, which nothing reads
            mbarrier.wait(ready_k.index((tile + 1) % STAGES), (tile + 1) // STAGES & 1, pred=first + KEYS < end)
            next_scores = score(q, k, (tile + 1) % STAGES, zeros)
            inside = first + gl.arange(0, KEYS, gl.SliceLayout(0, layout)) < end
            scores = gl.where(inside[None, :], scores, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 1) * unit)
            weights = gl.exp2(scores * unit - new_max[:, None])
            rescale = gl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + gl.sum(weights, 1)
            row_max = new_max
            mbarrier.wait(free_p.index(0), (hand & 1) ^ 1)
            p.store(weights.to(p.dtype))
            factors.store(rescale)
            if first + KEYS > end:  # the values of keys behind the last one may not be finite
                is_key = first + gl.arange(0, KEYS, gl.SliceLayout(1, lines)) < end
                for piece in gl.static_range(4):
                    values = view(k, (stage * 9 + piece * 2) * PAGES, KEYS, 128)
                    values.store(gl.where(is_key[:, None], values.load(lines), 0.0))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready_p.index(0), count=1)
            hand += 1
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, wide))[:, None]
            acc = warpgroup_mma(p, view(k, stage * 9 * PAGES, KEYS, 256), acc, is_async=True)
            acc, scores = warpgroup_mma_wait(0, deps=(acc, next_scores))
            gl.thread_barrier()
            mbarrier.arrive(free_k.index(stage), count=1)
            mbarrier.arrive(free_q.index(0), count=1, pred=(first + KEYS < end) & (first + 2 * KEYS >= end))
            tile += 1
        divisor = 1.0 / row_sum
        mbarrier.wait(free_p.index(0), (hand & 1) ^ 1)
        factors.store(divisor)
        gl.thread_barrier()
        mbarrier.arrive(ready_p.index(0), count=1)
        hand += 1
        store_result(acc * gl.convert_layout(divisor, gl.SliceLayout(1, wide))[:, None], results, is_whole, index, row, head, 0)
        if not is_whole:
            line = index * NUM_HEADS + head + gl.arange(0, 64, gl.SliceLayout(1, layout))
            gl.store(weights_pointer + line, row_max + gl.log2(row_sum))


@gluon.jit
def multiply_values(shared, results, schedule, numbers):
    """The second consumer group: the other 256 columns of the values."""
    _, k, p, factors, _, _, ready_k, free_k, ready_p, free_p = shared
    _, capacity, blocks, _ = numbers
    STAGES: gl.constexpr = ready_k.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    PAGES: gl.constexpr = KEYS // 16
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    tile = 0
    hand = 0
    first_item, last_item, head = locate_share(schedule, capacity, blocks)
    for index in range(first_item, last_item):
        row, _, begin, end = locate_item(index, schedule, capacity)
        is_whole = gl.load(schedule + HEADER + row * ROW + 1) == 1
        acc = gl.zeros([64, 256], gl.float32, wide)
        for _ in range(begin, end, KEYS):
            stage = tile % STAGES
            mbarrier.wait(ready_k.index(stage), tile // STAGES & 1)
            mbarrier.wait(ready_p.index(0), hand & 1)
            acc = acc * factors.load(gl.SliceLayout(1, wide))[:, None]
            acc = warpgroup_mma(p, view(k, (stage * 9 + 4) * PAGES, KEYS, 256), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(free_p.index(0), count=1)
            mbarrier.arrive(free_k.index(stage), count=1)
            hand += 1
            tile += 1
        mbarrier.wait(ready_p.index(0), hand & 1)
        acc = acc * factors.load(gl.SliceLayout(1, wide))[:, None]
        gl.thread_barrier()
        mbarrier.arrive(free_p.index(0), count=1)
        hand += 1
        store_result(acc, results, is_whole, index, row, head, 256)


@gluon.jit
def store_result(result, results, is_whole, index, row, head, FIRST: gl.constexpr):
    """Store 256 columns of 64 heads: to the output if the item is its row's only one, else as a
    partial result."""
    out, partials, _, num_heads = results
    layout: gl.constexpr = result.type.layout
    heads = head + gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = FIRST + gl.arange(0, 256, gl.SliceLayout(0, layout))
    if is_whole:
        places = (row * num_heads + heads).to(gl.int64)[:, None] * 512 + columns[None, :]
        gl.store(out + places, result.to(out.dtype.element_ty))
    else:
        places = (index * num_heads + heads).to(gl.int64)[:, None] * 512 + columns[None, :]
        gl.store(partials + places, result)


@gluon.jit(do_not_specialize=["table_stride", "capacity", "num_heads", "page_size", "unit"])
def latent_decode_kernel(
    q1_boxes,  # TMA descriptors of [rows, heads, columns]; boxes of 64 columns of 64 heads
    q2_boxes,
    k_boxes,  # TMA descriptor of [slots, 576]; boxes of 16 slots
    out,  # [rows, heads, 512]
    partials,  # float32 [lines, 512]
    weights,  # float32 [lines]
    schedule, page_table, table_stride, capacity, num_heads, page_size,
    unit,  # the scale of the scores times log2(e)
    KEYS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: shares * blocks of 64 heads. A program takes the items of a share one after another."""
    dtype: gl.constexpr = k_boxes.dtype
    q = gl.allocate_shared_memory(dtype, [9, 64, 64], k_boxes.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES * 9 * (KEYS // 16), 16, 64], k_boxes.layout)
    p = gl.allocate_shared_memory(
        dtype, [64, KEYS], gl.NVMMASharedLayout(swizzle_byte_width=min(128, KEYS * 2), element_bitwidth=16, rank=2)
    )
    factors = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready_q, free_q = allocate_barriers(1, 1, 1)
    ready_k, free_k = allocate_barriers(STAGES, 1, 2)
    ready_p, free_p = allocate_barriers(1, 1, 1)
    shared = q, k, p, factors, ready_q, free_q, ready_k, free_k, ready_p, free_p
    fence_async_shared()
    wait_for_previous(PDL)
    launch_dependents(PDL)
    results = out, partials, weights, num_heads
    numbers = table_stride, capacity, num_heads // 64, page_size
    gl.warp_specialize(
        [
            (attend_tiles, (shared, results, schedule, numbers, unit)),
            (multiply_values, (shared, results, schedule, numbers)),
            (produce, ((q1_boxes, q2_boxes, k_boxes), shared, schedule, page_table, numbers)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
