# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The inner loop that all kernels share: one tile of queries against a run of keys, with a running softmax in base 2.

Keys lie in pages or side by side. They may come in two parts (latent and rotated, or a width that is no power of two), so
that no part is padded to twice its size. Knows neither rows nor splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)


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
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """cap * tanh(scores / cap), by an exponential that cannot overflow to NaN."""
    return SOFT_CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / SOFT_CAP)) + 1.0))


@triton.jit
def scan_keys(
    q1,
    q2,
    query_at,  # [M] position of each query; keys up to it are seen
    top,
    total,
    acc,
    first,  # keys first … last - 1 are read
    last,
    scale,
    table,  # this row's entries of the page table
    key_start,  # where its keys begin, when they lie side by side
    k1_pointer,
    k2_pointer,
    v_pointer,
    k1_stride,
    k2_stride,
    v_stride,
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
    SHARED: tl.constexpr,  # the values are the first part of the keys
    MASKED: tl.constexpr,  # False: all keys are there in whole blocks, and all queries see them
    UPCAST: tl.constexpr,
):
    """-> (top, total, acc): running maximum (base 2), sum of weights, weighted sum of values."""
    steps = tl.arange(0, BLOCK_KEYS)
    columns1 = tl.arange(0, BLOCK1)
    columns2 = tl.arange(0, BLOCK2)
    value_columns = tl.arange(0, BLOCK_VALUE)
    for start in range(first, last, BLOCK_KEYS):
        keys = start + steps
        valid = keys < last
        if PAGE_SIZE > 0:
            if MASKED:
                page = tl.load(table + keys // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
            else:
                page = tl.load(table + keys // PAGE_SIZE).to(tl.int64)
            places = page * PAGE_SIZE + keys % PAGE_SIZE
        else:
            places = (key_start + keys).to(tl.int64)
        k1 = load_rows(k1_pointer, places, k1_stride, columns1, WIDTH1, valid, MASKED, UPCAST)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if WIDTH2 > 0:
            k2 = load_rows(k2_pointer, places, k2_stride, columns2, WIDTH2, valid, MASKED, UPCAST)
            scores += tl.dot(q2, tl.trans(k2), input_precision="ieee")
        if SOFT_CAP > 0:
            scores = soft_capped(scores * scale, SOFT_CAP) * LOG2E
        else:
            scores *= scale * LOG2E
        if MASKED:
            seen = valid[None, :] & (keys[None, :] <= query_at[:, None])
            if WINDOW > 0:
                seen &= keys[None, :] > query_at[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
        if MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query that has seen no key yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        if SHARED:
            v = k1
        else:
            v = load_rows(v_pointer, places, v_stride, value_columns, VALUE, valid, MASKED, UPCAST)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one launch."""

    queries: int  # BLOCK_QUERIES
    keys: int  # BLOCK_KEYS
    warps: int
    stages: int


def padded(width: int) -> int:
    """The tile width of `width` columns: a power of two that `tl.dot` takes."""
    return max(16, triton.next_power_of_2(width))


def split_width(width: int) -> tuple[int, int]:
    """A width as a power of two and a rest, so that 192 costs 128 + 64 instead of 256."""
    if padded(width) == width or width < 32:
        return width, 0
    largest: int = triton.next_power_of_2(width) // 2
    return largest, width - largest


def choose_tile(queries: int, columns: tuple[int, int, int], itemsize: int, shared_memory: int, is_decode: bool) -> Tile:
    """The first of the tile sizes, fastest first as measured on an H200, that fits the device's shared memory.

    `columns` are the padded widths of both key parts and of values that are loaded besides (0: they are the keys' first part).
    """
    key_bytes = sum(columns) * itemsize
    query_bytes = queries * (columns[0] + columns[1]) * itemsize
    warps = 8 if queries >= 64 and queries * max(columns) >= 128 * 128 else 4
    wide = [(128, 3), (64, 3)] if queries >= 128 and not is_decode else []
    for keys, stages in (*wide, (64, 2), (32, 2), (64, 1), (32, 1)):
        if query_bytes + stages * keys * key_bytes <= shared_memory:
            return Tile(queries, keys, warps, stages)
    return Tile(queries, 16, warps, 1)
