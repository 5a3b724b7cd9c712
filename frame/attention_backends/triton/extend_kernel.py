# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The extend kernel: FlashAttention-2 style causal attention of tiles of query tokens, with cached
prefixes of any length.

A program takes a tile of queries together with the heads that share its keys. It reads the cached
prefix from pages and this step's keys from contiguous tensors. No split-KV: extends have enough
query tiles to fill a device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.attention_backends.triton.online_softmax import LOG2E, SPAN, TREE, attend_causal, load_queries, store_rows


@triton.jit(do_not_specialize=["num_tiles", "first_row", "table_stride"])
def extend_kernel(
    q1_pointer, q2_pointer,
    k1_pointer,  # of the cache, if PAGED
    k2_pointer, v_pointer,
    ragged1,  # ragged keys and values, if HAS_RAGGED: pointers, or TMA descriptors if USE_TMA
    ragged2, ragged_v, out_pointer, sinks_pointer,
    tiles,  # int32 [2, num_tiles]: extend row of each tile, and its first query in the row
    query_starts,  # int32 [rows + 1]
    seq_lens,  # int32 [rows]
    request_slots,  # int64 [rows]
    page_table,
    key_starts,  # int32 [extend rows]: start of each row's ragged keys, if RAGGED_HAS_ALL
    k_scales,  # float16 [slots, kv heads] of an int8 cache, if SCALE_STRIDE > 0
    v_scales,
    query_bits,  # int32 [tokens], if MASK is TREE or SPAN
    num_tiles,
    first_row,  # index of the first extend row
    table_stride, scale, value_scale,
    Q1_STRIDE: tl.constexpr, Q1_HEAD: tl.constexpr, Q2_STRIDE: tl.constexpr, Q2_HEAD: tl.constexpr, K1_STRIDE: tl.constexpr,
    K1_HEAD: tl.constexpr, K2_STRIDE: tl.constexpr, K2_HEAD: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, RAGGED1_STRIDE: tl.constexpr, RAGGED1_HEAD: tl.constexpr, RAGGED2_STRIDE: tl.constexpr,
    RAGGED2_HEAD: tl.constexpr, RAGGED_V_STRIDE: tl.constexpr, RAGGED_V_HEAD: tl.constexpr, OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEADS: tl.constexpr,  # query heads per program
    PAGE_SIZE: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, VALUE: tl.constexpr, BLOCK1: tl.constexpr,
    BLOCK2: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    PAGED: tl.constexpr,  # some keys are read from the paged cache
    HAS_RAGGED: tl.constexpr,  # some keys are ragged: this step's own, or all
    RAGGED_HAS_ALL: tl.constexpr, USE_TMA: tl.constexpr,
    MASK: tl.constexpr,  # CAUSAL; TREE: some rows are trees of at most 32 drafted tokens; SPAN: some tokens see later ones
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (kv heads * blocks of `HEADS` query heads, tiles). Tiles with most keys come first, and
    start on all heads first."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1)
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // blocks
    extend = tl.load(tiles + tile)
    first_query = tl.load(tiles + num_tiles + tile)
    row = first_row + extend
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
    if HAS_SINKS:  # a sink is one more logit, without a value
        row_max = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        row_sum = tl.full([BLOCK_QUERIES], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_QUERIES], tl.float32)
    state = row_max, row_sum, tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32)

    end = tl.minimum(seq_len, prefix + first_query + per_tile)
    window_start = 0
    if WINDOW > 0:
        window_start = tl.maximum(0, prefix + first_query - WINDOW + 1)
    elif WINDOW < 0:  # chunks of -WINDOW keys
        window_start = (prefix + first_query) // -WINDOW * -WINDOW
    seen = prefix + first_query + 1  # keys that all queries of the tile see, if there is no window
    bits = query
    if MASK == TREE:
        seen = prefix + tl.maximum(0, first_query - 31)
        bits = tl.load(query_bits + token, mask=valid, other=-1)
    elif MASK == SPAN:
        bits = tl.load(query_bits + token, mask=valid, other=0)
        end = tl.maximum(end, tl.minimum(seq_len, tl.max(bits, 0)))
    begin = 0  # first ragged key
    if PAGED:
        stop = prefix if HAS_RAGGED else end
        first = window_start // BLOCK_KEYS * BLOCK_KEYS
        whole = tl.minimum(stop, seen) // BLOCK_KEYS * BLOCK_KEYS if WINDOW == 0 else first
        state = attend_causal(
            queries, prefix + query, bits, state, first, whole, stop, scale, table, 0, (k1_pointer, k2_pointer, v_pointer),
            (kv_head * K1_HEAD, kv_head * K2_HEAD, kv_head * V_HEAD), (k_scales + kv_head, v_scales + kv_head),
            (K1_STRIDE, K2_STRIDE, V_STRIDE), SCALE_STRIDE, PAGE_SIZE, WIDTHS, BLOCKS, BLOCK_KEYS,
            WINDOW, SOFT_CAP, VALUES_IN_KEYS, MASK, False, WIDE, UPCAST,
        )  # fmt: skip
        begin = prefix
    if HAS_RAGGED:
        start = tl.load(key_starts + extend) if RAGGED_HAS_ALL else token_start - prefix
        if not RAGGED_HAS_ALL:
            begin = prefix
        first = begin + tl.maximum(0, window_start - begin) // BLOCK_KEYS * BLOCK_KEYS
        whole = begin + (tl.minimum(end, seen) - begin) // BLOCK_KEYS * BLOCK_KEYS if WINDOW == 0 else first
        state = attend_causal(
            queries, prefix + query, bits, state, first, whole, end, scale, table, start, (ragged1, ragged2, ragged_v),
            (kv_head * RAGGED1_HEAD, kv_head * RAGGED2_HEAD, kv_head * RAGGED_V_HEAD), (k_scales, v_scales),
            (RAGGED1_STRIDE, RAGGED2_STRIDE, RAGGED_V_STRIDE), 0, 0, WIDTHS, BLOCKS, BLOCK_KEYS,
            WINDOW, SOFT_CAP, VALUES_IN_KEYS, MASK, USE_TMA, WIDE, UPCAST,
        )  # fmt: skip
    _, row_sum, acc = state
    out = acc * (value_scale / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
    store_rows(out_pointer, token, head, out, valid, OUT_STRIDE, OUT_HEAD, VALUE)
