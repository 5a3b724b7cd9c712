# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Merges the partial results of split-KV decode: out = sum_i 2^w[i] * part[i] / sum_i 2^w[i].

Called by the last program of a row (`decode_kernel`), or as its own kernel. Depends on no keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.attention_backends.triton.split_schedule import HEADER, ROW


@triton.jit
def locate_part(own_first, own_count, shared_first, within, part, own_lines, head, TILE_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr):
    """The line of a row and head's `part`-th part. Parts of shared prefixes (by item, row of the
    tile, head) come after own ones."""
    own = (own_first + part) * NUM_HEADS + head
    if TILE_ROWS > 0:
        shared = own_lines + ((shared_first + part - own_count) * TILE_ROWS + within) * NUM_HEADS + head
        return tl.where(part < own_count, own, shared).to(tl.int64)
    else:
        return own.to(tl.int64)


@triton.jit
def load_part(
    parts_pointer,
    weights_pointer,
    own_first,  # [N], as all of the following
    own_count,
    shared_first,
    shared_count,
    within,
    part,  # scalar, as the next
    own_lines,
    head,
    valid,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """(log2 of its sum of weights [N], -inf where a row has no such part; 1 or 0 [N]; its result
    [N, value])."""
    columns = tl.arange(0, BLOCK_VALUE)
    used = valid & (part < own_count + shared_count)
    line = locate_part(own_first, own_count, shared_first, within, part, own_lines, head, TILE_ROWS, NUM_HEADS)
    # other programs wrote them while this one ran, so the first-level cache is bypassed
    weight = tl.load(weights_pointer + line, mask=used, other=float("-inf"), cache_modifier=".cg")
    mask = used[:, None] & (columns < VALUE)[None, :]
    value = tl.load(parts_pointer + line[:, None] * VALUE + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return weight, used.to(tl.float32), value


@triton.jit
def merge_softmax(row_max, row_sum, acc, other_max, other_sum, other_acc):
    """Merge two running softmaxes (maximum, sum, weighted values)."""
    new_max = tl.maximum(row_max, other_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale, other_rescale = tl.exp2(row_max - base), tl.exp2(other_max - base)
    return new_max, row_sum * rescale + other_sum * other_rescale, acc * rescale[:, None] + other_acc * other_rescale[:, None]


@triton.jit
def merge_parts(
    parts_pointer,
    weights_pointer,
    out_pointer,
    own_first,  # [N], as all of the following
    own_count,
    shared_first,
    shared_count,
    within,
    own_lines,  # scalar
    row,
    head,
    valid,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    LANES: tl.constexpr,
):
    """Merge the parts of rows and heads, and store the result. Four parts are loaded at a time;
    each thread merges what it loaded."""
    row_max = tl.full([LANES], float("-inf"), tl.float32)
    row_sum = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, BLOCK_VALUE], tl.float32)
    for part in range(0, tl.max(tl.where(valid, own_count + shared_count, 0), 0), 4):
        max0, sum0, acc0 = load_part(
            parts_pointer, weights_pointer, own_first, own_count, shared_first, shared_count, within, part,
            own_lines, head, valid, NUM_HEADS, VALUE, BLOCK_VALUE, TILE_ROWS,
        )  # fmt: skip
        max1, sum1, acc1 = load_part(
            parts_pointer, weights_pointer, own_first, own_count, shared_first, shared_count, within, part + 1,
            own_lines, head, valid, NUM_HEADS, VALUE, BLOCK_VALUE, TILE_ROWS,
        )  # fmt: skip
        max2, sum2, acc2 = load_part(
            parts_pointer, weights_pointer, own_first, own_count, shared_first, shared_count, within, part + 2,
            own_lines, head, valid, NUM_HEADS, VALUE, BLOCK_VALUE, TILE_ROWS,
        )  # fmt: skip
        max3, sum3, acc3 = load_part(
            parts_pointer, weights_pointer, own_first, own_count, shared_first, shared_count, within, part + 3,
            own_lines, head, valid, NUM_HEADS, VALUE, BLOCK_VALUE, TILE_ROWS,
        )  # fmt: skip
        max0, sum0, acc0 = merge_softmax(max0, sum0, acc0, max1, sum1, acc1)
        max2, sum2, acc2 = merge_softmax(max2, sum2, acc2, max3, sum3, acc3)
        max0, sum0, acc0 = merge_softmax(max0, sum0, acc0, max2, sum2, acc2)
        row_max, row_sum, acc = merge_softmax(row_max, row_sum, acc, max0, sum0, acc0)
    columns = tl.arange(0, BLOCK_VALUE)
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    places = (row.to(tl.int64) * OUT_STRIDE + head * OUT_HEAD)[:, None] + columns[None, :]
    tl.store(out_pointer + places, out.to(out_pointer.dtype.element_ty), mask=valid[:, None] & (columns < VALUE)[None, :])


@triton.jit(do_not_specialize=["own_items"])
def merge_kernel(
    parts_pointer,
    weights_pointer,
    out_pointer,
    schedule,
    own_items,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (blocks of HEADS heads, rows). For shapes whose parts are too large for one merging
    program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.zeros([HEADS], tl.int32) + tl.program_id(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    info = schedule + HEADER + row * ROW
    own_count = tl.load(info + 1)
    shared_count = tl.load(info + 3)
    if tl.max(own_count + shared_count, 0) > 1:
        merge_parts(
            parts_pointer,
            weights_pointer,
            out_pointer,
            tl.load(info),
            own_count,
            tl.load(info + 2),
            shared_count,
            tl.load(info + 4),
            own_items * NUM_HEADS,
            row,
            head,
            head < NUM_HEADS,
            NUM_HEADS,
            VALUE,
            BLOCK_VALUE,
            TILE_ROWS,
            OUT_STRIDE,
            OUT_HEAD,
            HEADS,
        )
