# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Attention whose result for a token has the same bits in every batch.

All tokens, of decodes and of extends, are computed in tiles of one size. `split_kernel` computes
each split, which is a run of keys at absolute positions, in blocks of keys that are masked alike;
hidden keys and queries of other rows add exactly nothing. The splits of a token are summed in their
order: by `split_kernel` where one program computes all of a tile, otherwise by `merge_kernel`, with
the same operations. Depends on no batch size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.attention_backends.triton.online_softmax import CAUSAL, LOG2E, attend_keys, load_queries, store_rows
from frame.kernels.launch import launch_dependents, wait_for_previous

# Splits of SHORT keys up to key EDGE, of LONG from there on: one request with a short context
# occupies the device, and the splits of a long one remain few.
EDGE, SHORT, LONG = tl.constexpr(16384), tl.constexpr(256), tl.constexpr(2048)
NUM_SHORT = tl.constexpr(EDGE.value // SHORT.value)
UNROLL = tl.constexpr(4)  # splits that a merging program loads at once


def count_splits(keys: int) -> int:
    """Splits of `keys` keys."""
    return -(-min(keys, EDGE.value) // SHORT.value) + -(-max(0, keys - EDGE.value) // LONG.value)


@triton.jit
def find_split(key):
    """The split of a key."""
    return tl.where(key < EDGE, key // SHORT, NUM_SHORT + (key - EDGE) // LONG)


@triton.jit
def find_first_key(split):
    """The first key of a split."""
    return tl.where(split < NUM_SHORT, split * SHORT, EDGE + (split - NUM_SHORT) * LONG)


@triton.jit
def start_sum(sinks_pointer, head, valid, BLOCK_VALUE: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The sum of no split of heads [M]: (maximum [M], sum of weights [M], values [M, BLOCK_VALUE]).
    A sink is one more logit, without a value."""
    row_sum = tl.zeros([head.shape[0]], tl.float32)
    row_max = row_sum + float("-inf")
    if HAS_SINKS:
        row_max = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        row_sum += 1.0
    return row_max, row_sum, tl.zeros([head.shape[0], BLOCK_VALUE], tl.float32)


@triton.jit
def add_split(total, split):
    """The sum and one more split, both as of `start_sum`. Explicit FMAs, so that no compiler rounds
    otherwise in one of the kernels."""
    row_max = tl.maximum(total[0], split[0])
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    kept, added = tl.exp2(total[0] - base), tl.exp2(split[0] - base)
    row_sum = tl.fma(split[1], added, total[1] * kept)
    acc = tl.fma(split[2], tl.broadcast_to(added[:, None], split[2].shape), total[2] * kept[:, None])
    return row_max, row_sum, acc


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
    out_pointer, sinks_pointer,
    tiles,  # int32 [2, num_tiles]: row of each tile, and its first query in the row
    query_starts,  # int32 [rows + 1]
    seq_lens,  # int32 [rows]
    request_slots,  # int64 [rows]
    page_table,
    k_scales,  # float16 [slots, kv heads] of an int8 cache, if SCALE_STRIDE > 0
    v_scales,
    num_tiles, first_tile,
    first_token,  # of the tile `first_tile`, the first of this launch
    max_splits, table_stride, scale, value_scale,
    Q1_STRIDE: tl.constexpr, Q1_HEAD: tl.constexpr, Q2_STRIDE: tl.constexpr, Q2_HEAD: tl.constexpr, K1_STRIDE: tl.constexpr,
    K1_HEAD: tl.constexpr, K2_STRIDE: tl.constexpr, K2_HEAD: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEADS: tl.constexpr,  # query heads per program
    NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, VALUE: tl.constexpr,
    BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
    MERGES: tl.constexpr,  # writes `out`; otherwise `partials`, `sums` and `at`
    HAS_SINKS: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (kv heads * blocks of `HEADS` query heads, tiles, programs that take turns at the
    splits: one if it MERGES)."""
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
    if MERGES:
        total = start_sum(sinks_pointer, head, valid, BLOCK_VALUE, HAS_SINKS)
    else:
        tl.store(at_pointer + token - first_token, prefix + query, mask=valid & (head == 0))

    end = tl.minimum(seq_len, prefix + first_query + per_tile)
    visible = first_visible(prefix + first_query, WINDOW)
    columns = tl.arange(0, BLOCK_VALUE)
    for split in range(find_split(visible) + tl.program_id(2), find_split(end - 1) + 1, tl.num_programs(2)):
        state = (
            tl.full([BLOCK_QUERIES], float("-inf"), tl.float32),
            tl.zeros([BLOCK_QUERIES], tl.float32),
            tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32),
        )
        state = attend_keys(
            queries, prefix + query, query, state, tl.maximum(find_first_key(split), visible // BLOCK_KEYS * BLOCK_KEYS),
            tl.minimum(end, find_first_key(split + 1)), scale, table, 0, (k1_pointer, k2_pointer, v_pointer),
            (kv_head * K1_HEAD, kv_head * K2_HEAD, kv_head * V_HEAD), (k_scales + kv_head, v_scales + kv_head),
            (K1_STRIDE, K2_STRIDE, V_STRIDE), SCALE_STRIDE, PAGE_SIZE, WIDTHS, BLOCKS, BLOCK_KEYS,
            WINDOW, SOFT_CAP, VALUES_IN_KEYS, CAUSAL, False, WIDE, UPCAST,
        )  # fmt: skip
        if MERGES:
            total = add_split(total, state)
        else:
            line = ((token - first_token) * max_splits + split) * NUM_HEADS + head
            mask = valid[:, None] & (columns < VALUE)[None, :]
            tl.store(partials_pointer + line[:, None] * VALUE + columns[None, :], state[2], mask=mask)
            tl.store(sums_pointer + line * 2, state[0], mask=valid)
            tl.store(sums_pointer + line * 2 + 1, state[1], mask=valid)
    if MERGES:
        out = total[2] * (value_scale / tl.where(valid, total[1], 1.0))[:, None]
        store_rows(out_pointer, token, head, out, valid, OUT_STRIDE, OUT_HEAD, VALUE)


@triton.jit(do_not_specialize=["first_token", "max_splits"])
def merge_kernel(
    partials_pointer, sums_pointer, at_pointer, out_pointer, sinks_pointer, first_token, max_splits, value_scale,
    NUM_HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, WINDOW: tl.constexpr,
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
    last = find_split(position)
    total = start_sum(sinks_pointer, head, valid, BLOCK_VALUE, HAS_SINKS)
    for group in range(find_split(first_visible(position, WINDOW)), last + 1, UNROLL):
        for split in tl.static_range(UNROLL):  # one past the last has no weight, and adds nothing
            present = head < tl.where(group + split <= last, NUM_HEADS, 0)
            line = (index.to(tl.int64) * max_splits + group + split) * NUM_HEADS + head
            mask = present[:, None] & (columns < VALUE)[None, :]
            row_max = tl.load(sums_pointer + line * 2, mask=present, other=float("-inf"))
            row_sum = tl.load(sums_pointer + line * 2 + 1, mask=present, other=0.0)
            acc = tl.load(partials_pointer + line[:, None] * VALUE + columns[None, :], mask=mask, other=0.0)
            total = add_split(total, (row_max, row_sum, acc))
    out = total[2] * (value_scale / tl.where(valid, total[1], 1.0))[:, None]
    store_rows(out_pointer, tl.zeros([HEADS], tl.int64) + first_token + index, head, out, valid, OUT_STRIDE, OUT_HEAD, VALUE)
