# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The inner loop that all kernels share: one tile of queries against a run of keys, with a running softmax in base 2.

Keys lie in pages or side by side. They may come in two parts (latent and rotated, or a width that is no power of two), so
that no part is padded to twice its size. Knows neither rows nor splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)
# products of float32 numbers: three on the tensor cores, of parts that together hold all but the last bits (arXiv 2203.03341). On the other
# cores they are exact, and unrolled to so much code that a wide tile compiles for minutes.
PRECISION = tl.constexpr("tf32x3")
# which scores a scan takes out: none, those past the last key, or those that a query's position or window hides as well
NONE, TAIL, CAUSAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_rows(pointer, places, stride, columns, WIDTH: tl.constexpr, valid, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, columns] of a matrix whose last dimension is contiguous; zero in columns past its width and, if `MASKED`, in rows
    that are not valid."""
    pointers = pointer + places[:, None] * stride + columns[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif columns.shape[0] > WIDTH:
        tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    if UPCAST:  # the interpreter adds and multiplies bfloat16 wrongly
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def cast_queries(queries, keys_pointer, UPCAST: tl.constexpr):
    """Queries as keys of this type are multiplied with: bfloat16 ones become float16 for an fp8 cache, whose numbers become that in one
    instruction, and bfloat16 in several."""
    if keys_pointer.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype.primitive_bitwidth == 16 and not UPCAST:
        return queries.to(tl.float16)
    else:
        return queries


@triton.jit
def load_keys(
    source,  # a pointer, or a descriptor of [rows, columns]
    column,
    row,
    places,
    STRIDE: tl.constexpr,
    columns,
    WIDTH: tl.constexpr,
    USE_TMA: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[keys, columns] of keys or values from `column` on: a box of consecutive rows from `row` on, or rows at any places."""
    if USE_TMA:
        tile = source.load([row, column])
        if UPCAST:
            tile = tile.to(tl.float32)
        return tile
    else:
        return load_rows(source + column, places, STRIDE, columns, WIDTH, None, False, UPCAST)


@triton.jit
def apply_soft_cap(scores, SOFT_CAP: tl.constexpr):
    """cap * tanh(scores / cap), by an exponential that cannot overflow to NaN."""
    return SOFT_CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / SOFT_CAP)) + 1.0))


@triton.jit
def attend_keys(
    q1,
    q2,
    query_at,  # [M] position of each query, for MASK == CAUSAL
    row_max,
    row_sum,
    acc,
    first,  # keys first … last - 1 are read
    last,
    scale,  # > 0
    table,  # this row's entries of the page table
    key_start,  # where key 0 lies, when they lie side by side
    k1,
    k2,
    v,
    k1_column,
    k2_column,
    v_column,
    K1_STRIDE: tl.constexpr,
    K2_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: side by side
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK1: tl.constexpr,
    BLOCK2: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,  # the values are the first part of the keys
    MASK: tl.constexpr,  # NONE, TAIL or CAUSAL
    USE_TMA: tl.constexpr,  # keys lie side by side and k1, k2 and v are descriptors; else pointers
    WIDE: tl.constexpr,  # the cache has more numbers than an int32 counts
    UPCAST: tl.constexpr,
):
    """-> (top, total, acc): running maximum (base 2), sum of weights, weighted sum of values."""
    steps = tl.arange(0, BLOCK_KEYS)
    columns1 = tl.arange(0, BLOCK1)
    columns2 = tl.arange(0, BLOCK2)
    value_columns = tl.arange(0, BLOCK_VALUE)
    final = tl.maximum(last - 1, 0)
    if PAGE_SIZE > 0:  # one step ahead, so that no load of keys waits for the one of their page
        page = tl.load(table + tl.minimum(first + steps, final) // PAGE_SIZE)
    for start in range(first, last, BLOCK_KEYS):
        keys = start + steps
        # past the last key that one is read again: no load needs a mask, and what has no weight is finite all the same
        read = keys if MASK == NONE else tl.minimum(keys, final)
        if PAGE_SIZE > 0:
            places = page * PAGE_SIZE + read % PAGE_SIZE
            page = tl.load(table + tl.minimum(keys + BLOCK_KEYS, final) // PAGE_SIZE)
        else:
            places = key_start + read
        if WIDE:
            places = places.to(tl.int64)
        row = key_start + start
        keys1 = load_keys(k1, k1_column, row, places, K1_STRIDE, columns1, WIDTH1, USE_TMA, UPCAST).to(q1.dtype)
        scores = tl.dot(q1, tl.trans(keys1), input_precision=PRECISION)
        if WIDTH2 > 0:
            keys2 = load_keys(k2, k2_column, row, places, K2_STRIDE, columns2, WIDTH2, USE_TMA, UPCAST).to(q1.dtype)
            scores = tl.dot(q2, tl.trans(keys2), scores, input_precision=PRECISION)
        if SOFT_CAP > 0:
            scores = apply_soft_cap(scores * scale, SOFT_CAP)
        if MASK == TAIL:
            scores = tl.where((keys < last)[None, :], scores, float("-inf"))
        elif MASK == CAUSAL:
            seen = (keys < last)[None, :] & (keys[None, :] <= query_at[:, None])
            if WINDOW > 0:
                seen &= keys[None, :] > query_at[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        unit = LOG2E if SOFT_CAP > 0 else scale * LOG2E  # one multiplication, fused with the subtraction in the exponent
        new_max = tl.maximum(row_max, tl.max(scores, 1) * unit)
        base = new_max
        if MASK == CAUSAL:
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a query that has seen no key yet
        weights = tl.exp2(scores * unit - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        if VALUES_IN_KEYS:
            values = keys1
        else:
            values = load_keys(v, v_column, row, places, V_STRIDE, value_columns, VALUE, USE_TMA, UPCAST).to(q1.dtype)
            if USE_TMA and MASK != NONE:  # a box may reach into another row's values, which may be anything
                values = tl.where((keys < last)[:, None], values, 0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def attend_causal(
    q1,
    q2,
    query_at,
    row_max,
    row_sum,
    acc,
    first,
    whole,
    last,
    scale,
    table,
    key_start,
    k1,
    k2,
    v,
    k1_column,
    k2_column,
    v_column,
    K1_STRIDE: tl.constexpr,
    K2_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK1: tl.constexpr,
    BLOCK2: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`attend_keys` in two parts: keys first … whole - 1, in whole blocks, are seen by all queries and need no mask; the rest does."""
    row_max, row_sum, acc = attend_keys(
        q1,
        q2,
        query_at,
        row_max,
        row_sum,
        acc,
        first,
        whole,
        scale,
        table,
        key_start,
        k1,
        k2,
        v,
        k1_column,
        k2_column,
        v_column,
        K1_STRIDE,
        K2_STRIDE,
        V_STRIDE,
        PAGE_SIZE,
        WIDTH1,
        WIDTH2,
        VALUE,
        BLOCK1,
        BLOCK2,
        BLOCK_VALUE,
        BLOCK_KEYS,
        WINDOW,
        SOFT_CAP,
        VALUES_IN_KEYS,
        NONE,
        USE_TMA,
        WIDE,
        UPCAST,
    )
    row_max, row_sum, acc = attend_keys(
        q1,
        q2,
        query_at,
        row_max,
        row_sum,
        acc,
        whole,
        last,
        scale,
        table,
        key_start,
        k1,
        k2,
        v,
        k1_column,
        k2_column,
        v_column,
        K1_STRIDE,
        K2_STRIDE,
        V_STRIDE,
        PAGE_SIZE,
        WIDTH1,
        WIDTH2,
        VALUE,
        BLOCK1,
        BLOCK2,
        BLOCK_VALUE,
        BLOCK_KEYS,
        WINDOW,
        SOFT_CAP,
        VALUES_IN_KEYS,
        CAUSAL,
        USE_TMA,
        WIDE,
        UPCAST,
    )
    return row_max, row_sum, acc
