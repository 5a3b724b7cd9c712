# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment,misc"
"""Merges the partial results of split-KV decode: out = sum_i 2^w[i] * partial[i] / sum_i 2^w[i].

Called by the last program of a row (`decode_kernel`), or as its own kernel. Depends on no keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.attention_backends.triton.online_softmax import store_rows
from frame.attention_backends.triton.split_schedule import HEADER, ROW


@triton.jit
def locate_partial(
    suffix_first, suffix_count, shared_first, within, index, suffix_lines, head, TILE_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr
):
    """The line of a row and head's `index`-th partial result. Those of shared prefixes (by item,
    row of the tile, head) come after those of suffixes."""
    suffix = (suffix_first + index) * NUM_HEADS + head
    if TILE_ROWS > 0:
        shared = suffix_lines + ((shared_first + index - suffix_count) * TILE_ROWS + within) * NUM_HEADS + head
        return tl.where(index < suffix_count, suffix, shared).to(tl.int64)
    else:
        return suffix.to(tl.int64)


@triton.jit
def load_partial(
    partials_pointer, weights_pointer,
    suffix_first,  # [N], as all of the following
    suffix_count, shared_first, shared_count, within,
    index,  # scalar, as the next
    suffix_lines, head, valid,
    NUM_HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """(log2 of its sum of weights [N], -inf where a row has no such result; 1 or 0 [N]; its result
    [N, value])."""
    columns = tl.arange(0, BLOCK_VALUE)
    used = valid & (index < suffix_count + shared_count)
    line = locate_partial(suffix_first, suffix_count, shared_first, within, index, suffix_lines, head, TILE_ROWS, NUM_HEADS)
    # other programs wrote them while this one ran, so the first-level cache is bypassed
    weight = tl.load(weights_pointer + line, mask=used, other=float("-inf"), cache_modifier=".cg")
    mask = used[:, None] & (columns < VALUE)[None, :]
    value = tl.load(partials_pointer + line[:, None] * VALUE + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return weight, used.to(tl.float32), value


@triton.jit
def merge_softmax(one, other):
    """Merge two running softmaxes (maximum, sum, weighted values)."""
    new_max = tl.maximum(one[0], other[0])
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale, other_rescale = tl.exp2(one[0] - base), tl.exp2(other[0] - base)
    return new_max, one[1] * rescale + other[1] * other_rescale, one[2] * rescale[:, None] + other[2] * other_rescale[:, None]


@triton.jit
def store_partials(partials_pointer, weights_pointer, line, value, weight, valid, VALUE: tl.constexpr):
    """Store partial results [N, value], and log2 of their sums of weights [N], to lines [N]."""
    columns = tl.arange(0, value.shape[1])
    mask = valid[:, None] & (columns < VALUE)[None, :]
    tl.store(partials_pointer + line[:, None] * VALUE + columns[None, :], value, mask=mask)
    tl.store(weights_pointer + line, weight, mask=valid)


@triton.jit
def merge_partials(
    partials_pointer, weights_pointer, out_pointer,
    suffix_first,  # [N], as all of the following
    suffix_count, shared_first, shared_count, within,
    suffix_lines,  # scalar
    row, head, valid,
    NUM_HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, TILE_ROWS: tl.constexpr,
    OUT_STRIDE: tl.constexpr, OUT_HEAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of rows and heads, and store the result. Four are loaded at a time;
    each thread merges what it loaded."""
    row_max = tl.full([LANES], float("-inf"), tl.float32)
    row_sum = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, BLOCK_VALUE], tl.float32)
    for index in range(0, tl.max(tl.where(valid, suffix_count + shared_count, 0), 0), 4):
        loaded = ()
        for ahead in tl.static_range(4):
            loaded += (
                load_partial(
                    partials_pointer, weights_pointer, suffix_first, suffix_count, shared_first, shared_count, within, index + ahead,
                    suffix_lines, head, valid, NUM_HEADS, VALUE, BLOCK_VALUE, TILE_ROWS,
                ),
            )  # fmt: skip
        left = merge_softmax(loaded[0], loaded[1])
        right = merge_softmax(loaded[2], loaded[3])
        row_max, row_sum, acc = merge_softmax((row_max, row_sum, acc), merge_softmax(left, right))
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    store_rows(out_pointer, row.to(tl.int64), head, out, valid, OUT_STRIDE, OUT_HEAD, VALUE)


@triton.jit(do_not_specialize=["suffix_items"])
def merge_kernel(
    partials_pointer, weights_pointer, out_pointer, schedule, suffix_items,
    NUM_HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, TILE_ROWS: tl.constexpr,
    OUT_STRIDE: tl.constexpr, OUT_HEAD: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of HEADS heads, rows). For shapes whose partial results are too large for one
    merging program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.zeros([HEADS], tl.int32) + tl.program_id(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    info = schedule + HEADER + row * ROW
    suffix_count = tl.load(info + 1)
    shared_count = tl.load(info + 3)
    if tl.max(suffix_count + shared_count, 0) > 1:
        merge_partials(
            partials_pointer, weights_pointer, out_pointer, tl.load(info), suffix_count, tl.load(info + 2), shared_count, tl.load(info + 4),
            suffix_items * NUM_HEADS, row, head, head < NUM_HEADS, NUM_HEADS, VALUE, BLOCK_VALUE, TILE_ROWS, OUT_STRIDE, OUT_HEAD, HEADS,
        )  # fmt: skip
