# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The inner loop of all kernels: one tile of queries against a run of keys, with an online softmax
in base 2 (FlashAttention-2, arXiv 2307.08691).

Keys are paged or contiguous. Queries and keys may come in two pieces (latent and rotated, or a
width that is no power of two), so that no piece is padded to twice its size. Depends neither on
rows nor on splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)
# float32 matmuls: three TF32 matmuls on the tensor cores, of split operands that keep all but the
# last bits (arXiv 2203.03341). Exact matmuls on the CUDA cores unroll to code that compiles for
# minutes with a wide tile.
PRECISION = tl.constexpr("tf32x3")
# The weights of int8 values are multiplied by it besides the scale, so that float16 represents
# them, and the result is divided by it.
VALUE_UNIT = tl.constexpr(128.0)
# which scores are masked: none, those past the last key, also those outside a query's position and
# window, or also those that a query's bits leave out; SPAN: as CAUSAL, but up to the end of a
# query's span
NONE, TAIL, CAUSAL, TREE, SPAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def load_rows(pointer, places, stride, columns, WIDTH: tl.constexpr, valid, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, columns] of a matrix whose last dimension is contiguous; 0 in columns past its width
    and, if MASKED, in invalid rows."""
    pointers = pointer + places[:, None] * stride + columns[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif columns.shape[0] > WIDTH:
        tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    if UPCAST:  # the interpreter computes bfloat16 sums and products incorrectly
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def cast_queries(queries, keys_pointer, UPCAST: tl.constexpr):
    """Queries in the type in which they multiply keys of this cache: for an fp8 or int8 cache
    bfloat16 becomes float16, to which both convert in fewer instructions than to bfloat16."""
    if keys_pointer.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype.primitive_bitwidth == 16 and not UPCAST:
        return queries.to(tl.float16)
    else:
        return queries


@triton.jit
def load_queries(
    pointers, row, head, valid, keys_pointer,
    STRIDES: tl.constexpr, HEAD_STRIDES: tl.constexpr, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(q1, q2): both pieces of the queries of heads `head` of rows `row` (int64), both [M]."""
    places = row * STRIDES[0] + head * HEAD_STRIDES[0]
    q1 = cast_queries(load_rows(pointers[0], places, 1, tl.arange(0, BLOCKS[0]), WIDTHS[0], valid, True, UPCAST), keys_pointer, UPCAST)
    places = row * STRIDES[1] + head * HEAD_STRIDES[1]
    q2 = cast_queries(load_rows(pointers[1], places, 1, tl.arange(0, BLOCKS[1]), WIDTHS[1], valid, True, UPCAST), keys_pointer, UPCAST)
    return q1, q2


@triton.jit
def store_rows(pointer, row, head, values, valid, STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Store values [M, columns] as the results of heads `head` of rows `row` (int64), both [M]."""
    columns = tl.arange(0, values.shape[1])
    places = (row * STRIDE + head * HEAD_STRIDE)[:, None] + columns[None, :]
    tl.store(pointer + places, values.to(pointer.dtype.element_ty), mask=valid[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def widen(numbers, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp8 or int8 numbers in `dtype`.

    Triton moves a plain conversion behind the load of a matmul's operand. A transposed operand of
    8 bits is then loaded byte by byte, which takes half of the instructions of a decode. It does
    not move inline assembly, so the operand has 16 bits.
    """
    if UPCAST or dtype != tl.float16 or numbers.dtype.primitive_bitwidth != 8:
        return numbers.to(dtype)
    elif numbers.dtype.is_fp8():
        return tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
            "=r,=r,r",
            [numbers.to(tl.uint8, bitcast=True)],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:  # a byte b as the last bits of 1024 + b, which float16 represents
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, c; xor.b32 a, $2, 0x80808080; mov.b32 c, 0x64806480; prmt.b32 $0, a, 0x64646464, 0x4140;"
            " prmt.b32 $1, a, 0x64646464, 0x4342; sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c;}",
            "=r,=r,r",
            [numbers],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def load_keys(
    source,  # a pointer, or a TMA descriptor of [rows, columns]
    column, row, places,
    STRIDE: tl.constexpr,
    columns,
    WIDTH: tl.constexpr, dtype: tl.constexpr, USE_TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """[keys, columns] of keys or values in `dtype`, from `column` on: a box of consecutive rows
    from `row` on, or rows at any slots."""
    if USE_TMA:
        tile = source.load([row, column])
        if UPCAST:
            tile = tile.to(tl.float32)
    else:
        tile = load_rows(source + column, places, STRIDE, columns, WIDTH, None, False, UPCAST)
    return widen(tile, dtype, UPCAST)


@triton.jit
def apply_soft_cap(scores, SOFT_CAP: tl.constexpr):
    """cap * tanh(scores / cap), by an exponential that cannot overflow to NaN."""
    return SOFT_CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / SOFT_CAP)) + 1.0))


@triton.jit
def attend_keys(
    queries,  # (q1, q2)
    query_at,  # [M] position of each query, for MASK >= CAUSAL
    query_bits,  # [M] `TreeMask.bits` of each query, for MASK == TREE; its `MediaSpans.ends` for MASK == SPAN
    state,  # (row_max [M], row_sum [M], acc [M, values])
    first,  # the keys first … end - 1
    end,
    scale,  # > 0
    table,  # this row's entries of the page table
    key_start,  # slot of key 0, if keys are contiguous
    sources,  # (k1, k2, v)
    first_columns,  # of the key head, in each of `sources`
    scales,  # (k_scales, v_scales) of the key head, if SCALE_STRIDE > 0
    STRIDES: tl.constexpr,  # of `sources`
    SCALE_STRIDE: tl.constexpr,  # of the slots of an int8 cache's scales; 0: no scales
    PAGE_SIZE: tl.constexpr,  # 0: contiguous keys
    WIDTHS: tl.constexpr,  # of `sources`
    BLOCKS: tl.constexpr,  # WIDTHS, padded to powers of two
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,  # the values are the first piece of the keys
    MASK: tl.constexpr,  # NONE, TAIL, CAUSAL, TREE or SPAN
    USE_TMA: tl.constexpr,  # contiguous keys, with `sources` as descriptors; otherwise pointers
    WIDE: tl.constexpr,  # element offsets exceed int32
    UPCAST: tl.constexpr,
):
    """For each block of keys:

        s = (q1 @ k1.T + q2 @ k2.T) * scale, soft cap, mask
        m' = max(m, rowmax(s)); p = exp2(s - m'); l = l * exp2(m - m') + rowsum(p)
        acc = acc * exp2(m - m') + p @ v

    Returns the state (row_max m, row_sum l, acc) with s in units of log2.
    """
    q1, q2 = queries
    row_max, row_sum, acc = state
    steps = tl.arange(0, BLOCK_KEYS)
    columns1 = tl.arange(0, BLOCKS[0])
    columns2 = tl.arange(0, BLOCKS[1])
    value_columns = tl.arange(0, BLOCKS[2])
    final = tl.maximum(end - 1, 0)
    if PAGE_SIZE > 0:  # loaded one step ahead, so that key loads do not wait for their page number
        page = tl.load(table + tl.minimum(first + steps, final) // PAGE_SIZE)
    for start in range(first, end, BLOCK_KEYS):
        keys = start + steps
        # past the last key, that key is read again: no load needs a mask, and masked values stay
        # finite
        read = keys if MASK == NONE else tl.minimum(keys, final)
        if PAGE_SIZE > 0:
            places = page * PAGE_SIZE + read % PAGE_SIZE
            page = tl.load(table + tl.minimum(keys + BLOCK_KEYS, final) // PAGE_SIZE)
        else:
            places = key_start + read
        if WIDE:
            places = places.to(tl.int64)
        row = key_start + start
        keys1 = load_keys(sources[0], first_columns[0], row, places, STRIDES[0], columns1, WIDTHS[0], q1.dtype, USE_TMA, UPCAST)
        scores = tl.dot(q1, tl.trans(keys1), input_precision=PRECISION)
        if WIDTHS[1] > 0:
            keys2 = load_keys(sources[1], first_columns[1], row, places, STRIDES[1], columns2, WIDTHS[1], q1.dtype, USE_TMA, UPCAST)
            scores = tl.dot(q2, tl.trans(keys2), scores, input_precision=PRECISION)
        if SCALE_STRIDE > 0:
            k_factor = tl.load(scales[0] + places * SCALE_STRIDE).to(tl.float32)
            scores *= k_factor[None, :]
        if SOFT_CAP > 0:
            scores = apply_soft_cap(scores * scale, SOFT_CAP)
        if MASK == TAIL:
            scores = tl.where((keys < end)[None, :], scores, float("-inf"))
        elif MASK >= CAUSAL:
            last = tl.maximum(query_at, query_bits - 1) if MASK == SPAN else query_at
            seen = (keys < end)[None, :] & (keys[None, :] <= last[:, None])
            if WINDOW > 0:
                seen &= keys[None, :] > query_at[:, None] - WINDOW
            elif WINDOW < 0:  # chunks of -WINDOW keys
                seen &= keys[None, :] >= (query_at // -WINDOW * -WINDOW)[:, None]
            if MASK == TREE:  # bit 31 is set, and stands for all keys that are further away
                behind = tl.minimum(tl.maximum(query_at[:, None] - keys[None, :], 0), 31)
                seen &= ((query_bits[:, None] >> behind) & 1) > 0
            scores = tl.where(seen, scores, float("-inf"))
        # one multiplication, fused with the subtraction in the exponent
        unit = LOG2E if SOFT_CAP > 0 else scale * LOG2E
        new_max = tl.maximum(row_max, tl.max(scores, 1) * unit)
        base = new_max
        if MASK >= CAUSAL:
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a query without any visible key yet
        weights = tl.exp2(scores * unit - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        if VALUES_IN_KEYS:
            values = keys1
        else:
            values = load_keys(sources[2], first_columns[2], row, places, STRIDES[2], value_columns, WIDTHS[2], q1.dtype, USE_TMA, UPCAST)
            if USE_TMA and MASK != NONE:  # a box may include another row's values, which may not be finite
                values = tl.where((keys < end)[:, None], values, 0.0)
        if SCALE_STRIDE > 0:
            v_factor = k_factor if VALUES_IN_KEYS else tl.load(scales[1] + places * SCALE_STRIDE).to(tl.float32)
            weights *= v_factor[None, :] * VALUE_UNIT
        acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def attend_causal(
    queries, query_at, query_bits, state,
    first, whole, end,
    scale, table, key_start, sources, first_columns, scales,
    STRIDES: tl.constexpr, SCALE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    MASK: tl.constexpr,  # CAUSAL, TREE or SPAN
    USE_TMA: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`attend_keys` twice: keys first … whole - 1, in whole blocks, are visible to all queries and
    need no mask; the rest is masked."""
    for masked in tl.static_range(2):
        state = attend_keys(
            queries, query_at, query_bits, state, whole if masked else first, end if masked else whole,
            scale, table, key_start, sources, first_columns, scales, STRIDES, SCALE_STRIDE, PAGE_SIZE, WIDTHS, BLOCKS, BLOCK_KEYS,
            WINDOW, SOFT_CAP, VALUES_IN_KEYS, MASK if masked else NONE, USE_TMA, WIDE, UPCAST,
        )  # fmt: skip
    return state
