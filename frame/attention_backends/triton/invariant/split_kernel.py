# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Attention whose result for a token has the same bits in every batch.

All tokens, of decodes and of extends, go through two kernels with tiles of one size. `split_kernel`
computes each run of SPLIT keys at absolute positions, in blocks of keys that are masked alike;
hidden keys and queries of other rows add exactly nothing. `merge_kernel` sums a token's runs in
their order. Depends on no batch size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.attention_backends.triton.online_softmax import CAUSAL, LOG2E, attend_keys, load_queries, store_rows
from frame.kernels.launch import launch_dependents, wait_for_previous


@triton.jit
def first_visible(position, WINDOW: tl.constexpr):
    """The first key that a query sees. WINDOW: tokens, or negative for chunks, or 0."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(0, position - WINDOW + 1)
    elif WINDOW < 0:
        first = position // -WINDOW * -WINDOW
    return first


@triton.jit(do_not_specialize=["num_tiles", "first_tile", "first_token", "max_splits", "table_stride"])
def split_kernel(
    q1_pointer, q2_pointer, k1_pointer, k2_pointer, v_pointer,
    partials_pointer,  # float32 [tokens, splits, heads, value]
    sums_pointer,  # float32 [tokens, splits, heads, 2]: maximum and sum of weights
    at_pointer,  # int32 [tokens]: positions
    tiles,  # int32 [2, num_tiles]: row of each tile, and its first query in the row
    query_starts,  # int32 [rows + 1]
    seq_lens,  # int32 [rows]
    request_slots,  # int64 [rows]
    page_table,
    k_scales,  # float16 [slots, kv heads] of an int8 cache, if SCALE_STRIDE > 0
    v_scales,
    num_tiles, first_tile,
    first_token,  # of the tile `first_tile`, the first of this launch
    max_splits, table_stride, scale,
    Q1_STRIDE: tl.constexpr, Q1_HEAD: tl.constexpr, Q2_STRIDE: tl.constexpr, Q2_HEAD: tl.constexpr, K1_STRIDE: tl.constexpr,
    K1_HEAD: tl.constexpr, K2_STRIDE: tl.constexpr, K2_HEAD: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEADS: tl.constexpr,  # query heads per program
    NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, VALUE: tl.constexpr,
    BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (kv heads * blocks of `HEADS` query heads, tiles, programs that take turns at the
    splits)."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    tile = first_tile + tl.program_id(1)
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // blocks
    row = tl.load(tiles + tile)
    first_query = tl.load(tiles + num_tiles + tile)
    token_start = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - token_start
    seq_len = tl.load(seq_lens + row)
    table = page_table + tl.load(request_slots + row) * table_stride
    prefix = seq_len - query_len

    places = tl.arange(0, BLOCK_QUERIES)
    per_tile: tl.constexpr = BLOCK_QUERIES // HEADS
    query = first_query + places // HEADS
    in_group = tl.program_id(0) % blocks * HEADS + places % HEADS
    valid = (places // HEADS < per_tile) & (query < query_len) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    token = (token_start + query).to(tl.int64)
    STRIDES: tl.constexpr = (Q1_STRIDE, Q2_STRIDE)
    HEAD_STRIDES: tl.constexpr = (Q1_HEAD, Q2_HEAD)
    WIDTHS: tl.constexpr = (WIDTH1, WIDTH2, VALUE)
    BLOCKS: tl.constexpr = (BLOCK1, BLOCK2, BLOCK_VALUE)
    queries = load_queries((q1_pointer, q2_pointer), token, head, valid, k1_pointer, STRIDES, HEAD_STRIDES, WIDTHS, BLOCKS, UPCAST)
    tl.store(at_pointer + token - first_token, prefix + query, mask=valid & (head == 0))

    end = tl.minimum(seq_len, prefix + first_query + per_tile)
    visible = first_visible(prefix + first_query, WINDOW)
    columns = tl.arange(0, BLOCK_VALUE)
    for split in range(visible // SPLIT + tl.program_id(2), (end + SPLIT - 1) // SPLIT, tl.num_programs(2)):
        state = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32), tl.zeros([BLOCK_QUERIES], tl.float32), tl.zeros(
            [BLOCK_QUERIES, BLOCK_VALUE], tl.float32
        )
        row_max, row_sum, acc = attend_keys(
            queries, prefix + query, query, state, tl.maximum(split * SPLIT, visible // BLOCK_KEYS * BLOCK_KEYS),
            tl.minimum(end, (split + 1) * SPLIT), scale, table, 0, (k1_pointer, k2_pointer, v_pointer),
            (kv_head * K1_HEAD, kv_head * K2_HEAD, kv_head * V_HEAD), (k_scales + kv_head, v_scales + kv_head),
            (K1_STRIDE, K2_STRIDE, V_STRIDE), SCALE_STRIDE, PAGE_SIZE, WIDTHS, BLOCKS, BLOCK_KEYS,
            WINDOW, SOFT_CAP, VALUES_IN_KEYS, CAUSAL, False, WIDE, UPCAST,
        )  # fmt: skip
        line = ((token - first_token) * max_splits + split) * NUM_HEADS + head
        mask = valid[:, None] & (columns < VALUE)[None, :]
        tl.store(partials_pointer + line[:, None] * VALUE + columns[None, :], acc, mask=mask)
        tl.store(sums_pointer + line * 2, row_max, mask=valid)
        tl.store(sums_pointer + line * 2 + 1, row_sum, mask=valid)


@triton.jit(do_not_specialize=["first_token", "max_splits"])
def merge_kernel(
    partials_pointer, sums_pointer, at_pointer, out_pointer, sinks_pointer, first_token, max_splits, value_scale,
    NUM_HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_HEAD: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of HEADS heads)."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    index = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = head < NUM_HEADS
    columns = tl.arange(0, BLOCK_VALUE)
    position = tl.load(at_pointer + index)
    first = first_visible(position, WINDOW) // SPLIT
    last = position // SPLIT
    start = index.to(tl.int64) * max_splits
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if HAS_SINKS:  # a sink is one more logit, without a value
        sinks = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        top = sinks
    for split in range(first, last + 1):
        top = tl.maximum(top, tl.load(sums_pointer + ((start + split) * NUM_HEADS + head) * 2, mask=valid, other=0.0))
    if HAS_SINKS:
        total = tl.exp2(sinks - top)
    acc = tl.zeros([HEADS, BLOCK_VALUE], tl.float32)
    for split in range(first, last + 1):
        line = (start + split) * NUM_HEADS + head
        weight = tl.exp2(tl.load(sums_pointer + line * 2, mask=valid, other=0.0) - top)
        total += tl.load(sums_pointer + line * 2 + 1, mask=valid, other=0.0) * weight
        mask = valid[:, None] & (columns < VALUE)[None, :]
        acc += tl.load(partials_pointer + line[:, None] * VALUE + columns[None, :], mask=mask, other=0.0) * weight[:, None]
    out = acc * (value_scale / tl.where(valid, total, 1.0))[:, None]
    store_rows(out_pointer, tl.zeros([HEADS], tl.int64) + first_token + index, head, out, valid, OUT_STRIDE, OUT_HEAD, VALUE)
