# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The decode kernel: split-KV attention of one query token per row (FlashDecoding), over a schedule
of work items (`split_schedule.py`).

All query heads that share a key head are one tile, so each key is read once per group; rows with a
common prefix form one tile over it (cascade attention, as in FlashInfer and Hydragen). Rows of
one request, as the tokens of a draft, form a tile too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.attention_backends.triton.merge_kernel import merge_partials, store_partials
from frame.attention_backends.triton.online_softmax import CAUSAL, LOG2E, TAIL, TREE, attend_keys, load_queries, store_rows
from frame.attention_backends.triton.split_schedule import HEADER, ITEM, ROW

SHARED_ARRIVAL = tl.constexpr(1 << 16)  # counters hold suffix items in the low bits, shared items above


@triton.jit
def arrive_shared(arrival, valid):
    """Count one more written result of the rows' shared prefix."""
    tl.debug_barrier()  # all threads must have written their result before the count
    tl.atomic_add(arrival, SHARED_ARRIVAL, mask=valid, sem="release", scope="gpu")


@triton.jit
def arrive_suffix(arrival, suffix_count, shared_count, TILE_ROWS: tl.constexpr):
    """Count one suffix result of a row as written. Returns whether it was the last, after all
    shared results of the row have been written too.

    The wait for shared results cannot deadlock: their items come first, so their programs have
    already started.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
    is_last = before % SHARED_ARRIVAL == suffix_count - 1
    if is_last:
        if TILE_ROWS > 0:
            while before // SHARED_ARRIVAL < shared_count:
                before = tl.atomic_add(arrival, 0, sem="acquire", scope="gpu")
        tl.store(arrival, 0)  # ready for the next launch
    tl.debug_barrier()
    return is_last


@triton.jit
def attend_item(
    queries,  # pointers of (q1, q2)
    row,  # [M]
    query_at,  # [M] position of each query, for MASK >= CAUSAL
    query_bits,  # [M], for MASK == TREE
    head,  # [M]
    valid, row_max, row_sum, begin, end, scale, value_scale, table, kv_head,
    keys,  # pointers of (k1, k2, v)
    scales,  # of an int8 cache: pointers of those of keys and of values
    STRIDES: tl.constexpr,  # of the rows of q1, q2, k1, k2 and v, and of a cache's scales
    HEAD_STRIDES: tl.constexpr,  # of the heads of q1, q2, k1, k2 and v
    PAGE_SIZE: tl.constexpr, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SOFT_CAP: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr, LANES: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One item's keys -> (normalised result of each lane, log2 of its sum of weights)."""
    loaded = load_queries(queries, row.to(tl.int64), head, valid, keys[0], STRIDES, HEAD_STRIDES, WIDTHS, BLOCKS, UPCAST)
    columns = kv_head * HEAD_STRIDES[2], kv_head * HEAD_STRIDES[3], kv_head * HEAD_STRIDES[4]
    row_max, row_sum, acc = attend_keys(
        loaded, query_at, query_bits, (row_max, row_sum, tl.zeros([LANES, BLOCKS[2]], tl.float32)), begin, end,
        scale, table, 0, keys, columns, (scales[0] + kv_head, scales[1] + kv_head), STRIDES[2:5], STRIDES[5], PAGE_SIZE,
        WIDTHS, BLOCKS, BLOCK_KEYS, 0, SOFT_CAP, VALUES_IN_KEYS, MASK, False, WIDE, UPCAST,
    )  # fmt: skip
    weight = row_max + tl.log2(row_sum)
    if MASK >= CAUSAL:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # of a query that sees none of the keys; its weight is -inf
    return acc * (value_scale / row_sum)[:, None], weight


@triton.jit(do_not_specialize=["table_stride", "capacity", "max_items", "suffix_items"])
def decode_kernel(
    q1_pointer, q2_pointer, k1_pointer, k2_pointer, v_pointer,
    out_pointer,  # [rows, heads, value]
    partials_pointer,  # float32 [lines, value]: partial results
    weights_pointer,  # float32 [lines]: log2 of the partial sums of weights
    sinks_pointer, schedule,
    order_pointer,  # int32: rows with shared prefixes, group by group
    page_table,
    k_scales,  # float16 [slots, kv heads] of an int8 cache, if SCALE_STRIDE > 0
    v_scales,
    tree_bits,  # int32 [rows], if TREES
    seq_lens,  # int32 [rows], if TREES
    table_stride, capacity, max_items, suffix_items, scale, value_scale,
    Q1_STRIDE: tl.constexpr, Q1_HEAD: tl.constexpr, Q2_STRIDE: tl.constexpr, Q2_HEAD: tl.constexpr, K1_STRIDE: tl.constexpr,
    K1_HEAD: tl.constexpr, K2_STRIDE: tl.constexpr, K2_HEAD: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_HEAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # 0: no shared prefixes
    TILE_LANES: tl.constexpr, TILE_KEYS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr,  # see `SplitConfig`
    TREES: tl.constexpr,  # rows may be tokens of trees, whose last 32 keys are masked
    MERGE_LANES: tl.constexpr,  # HEADS * TOKENS, padded to a power of two
    NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, VALUE: tl.constexpr,
    BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
    MERGE_IN_KERNEL: tl.constexpr,  # False: `merge_kernel` merges
    PDL: tl.constexpr,
):  # fmt: skip
    """out[r, h] = softmax(q[r, h] · K[r].T * scale) V[r]. Grid: (kv heads * blocks of `HEADS` query
    heads, items).

    The last program to finish a row's suffix items merges all partial results of the row, without
    another launch; for wide values `merge_kernel` merges.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: later kernels would occupy multiprocessors
    index = tl.program_id(1)
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // blocks
    first_head = tl.program_id(0) % blocks * HEADS
    row_records = schedule + HEADER
    item = row_records + capacity * ROW + index * ITEM
    arrivals = row_records + capacity * ROW + max_items * ITEM
    suffix_lines = suffix_items * TOKENS * NUM_HEADS  # lines of suffix results, token by token; those of shared prefixes come after them
    queries = q1_pointer, q2_pointer
    keys = k1_pointer, k2_pointer, v_pointer
    scales = k_scales, v_scales
    STRIDES: tl.constexpr = (Q1_STRIDE, Q2_STRIDE, K1_STRIDE, K2_STRIDE, V_STRIDE, SCALE_STRIDE)
    HEAD_STRIDES: tl.constexpr = (Q1_HEAD, Q2_HEAD, K1_HEAD, K2_HEAD, V_HEAD)
    WIDTHS: tl.constexpr = (WIDTH1, WIDTH2, VALUE)
    BLOCKS: tl.constexpr = (BLOCK1, BLOCK2, BLOCK_VALUE)
    num_items = tl.load(schedule)
    num_shared = tl.load(schedule + 1) if TILE_ROWS > 0 else 0
    which = tl.load(item)
    slot = tl.load(item + 1).to(tl.int64)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    if index < num_shared:
        if TILE_ROWS > 0:
            lane = tl.arange(0, TILE_LANES)
            in_tile = lane // HEADS
            in_group = first_head + lane % HEADS
            valid = (in_tile < tl.load(item + 4)) & (in_group < GROUP) & (in_tile < TILE_ROWS)
            head = kv_head * GROUP + in_group
            row = tl.load(order_pointer + which + in_tile, mask=valid, other=0)
            row_max = tl.full([TILE_LANES], float("-inf"), tl.float32)
            row_sum = tl.zeros([TILE_LANES], tl.float32)
            out, weight = attend_item(
                queries, row, row, row, head, valid, row_max, row_sum, begin, end, scale, value_scale,
                page_table + slot * table_stride, kv_head, keys, scales, STRIDES, HEAD_STRIDES, PAGE_SIZE, WIDTHS, BLOCKS,
                TILE_KEYS, SOFT_CAP, VALUES_IN_KEYS, TILE_LANES, TAIL, WIDE, UPCAST,
            )  # fmt: skip
            line = suffix_lines + ((index * TILE_ROWS + in_tile) * NUM_HEADS + head).to(tl.int64)
            store_partials(partials_pointer, weights_pointer, line, out, weight, valid, VALUE)
            if MERGE_IN_KERNEL:
                arrive_shared(arrivals + row * tl.num_programs(0) + tl.program_id(0), valid & (lane % HEADS == 0))
    elif index < num_items:
        lane = tl.arange(0, BLOCK_QUERIES)
        if TOKENS > 1:
            num_tokens = tl.load(item + 4)
            token = lane // HEADS
            in_group = first_head + lane % HEADS
            valid = (token < num_tokens) & (in_group < GROUP)
            row = token + which
            query_at = token + tl.load(item + 5)
            first_line = index - num_shared + token * suffix_items
        else:
            in_group = first_head + lane
            valid = (lane < HEADS) & (in_group < GROUP)
            row = tl.zeros([BLOCK_QUERIES], tl.int32) + which
            query_at = row
            first_line = index - num_shared
        bits = row
        if TREES:
            bits = tl.load(tree_bits + row, mask=valid, other=-1)
            query_at = tl.load(seq_lens + row, mask=valid, other=1) - 1
        head = kv_head * GROUP + in_group
        info = row_records + which * ROW
        suffix_first = tl.load(info)
        suffix_count = tl.load(info + 1)
        shared_first = tl.load(info + 2)
        shared_count = tl.load(info + 3)
        within = tl.load(info + 4)
        row_max = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_QUERIES], tl.float32)
        if HAS_SINKS:  # noqa: SIM102 - a constexpr, then a device value
            if index - num_shared == suffix_first:  # a sink counts once per row, not once per item
                row_max = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
                row_sum = tl.full([BLOCK_QUERIES], 1.0, tl.float32)
        out, weight = attend_item(
            queries, row, query_at, bits, head, valid, row_max, row_sum, begin, end, scale, value_scale,
            page_table + slot * table_stride, kv_head, keys, scales, STRIDES, HEAD_STRIDES, PAGE_SIZE, WIDTHS, BLOCKS,
            BLOCK_KEYS, SOFT_CAP, VALUES_IN_KEYS, BLOCK_QUERIES, TREE if TREES else CAUSAL if TOKENS > 1 else TAIL, WIDE, UPCAST,
        )  # fmt: skip
        if suffix_count + shared_count == 1:
            store_rows(out_pointer, row.to(tl.int64), head, out, valid, OUT_STRIDE, OUT_HEAD, VALUE)
        else:
            line = (first_line * NUM_HEADS + head).to(tl.int64)
            store_partials(partials_pointer, weights_pointer, line, out, weight, valid, VALUE)
            if MERGE_IN_KERNEL:
                few = tl.arange(0, MERGE_LANES)
                none = tl.zeros([MERGE_LANES], tl.int32)
                if TOKENS > 1:
                    valid_few = (few // HEADS < num_tokens) & (first_head + few % HEADS < GROUP)
                    head_few = kv_head * GROUP + first_head + few % HEADS
                    row_few = which + few // HEADS
                    first_few = suffix_first + few // HEADS * suffix_items
                else:
                    valid_few = (few < HEADS) & (first_head + few < GROUP)
                    head_few = kv_head * GROUP + first_head + few
                    row_few = none + which
                    first_few = none + suffix_first
                arrival = arrivals + which * tl.num_programs(0) + tl.program_id(0)
                if arrive_suffix(arrival, suffix_count, shared_count, TILE_ROWS):
                    merge_partials(
                        partials_pointer, weights_pointer, out_pointer, first_few, none + suffix_count, none + shared_first,
                        none + shared_count, none + within, suffix_lines, row_few, head_few, valid_few,
                        NUM_HEADS, VALUE, BLOCK_VALUE, TILE_ROWS, OUT_STRIDE, OUT_HEAD, MERGE_LANES,
                    )  # fmt: skip
