# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""The expanding product of low-rank deltas for tiles of 64 rows and more, as of long prompts.

A program computes several blocks of outputs of one tile, so that the loads of a block are under way
while another is multiplied. Used by `products.expand`; depends on no layer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.kernels.launch import launch_dependents, wait_for_previous
from frame.kernels.lora.pages import add_delta, find_tile, load_b


@triton.jit
def _multiply(b, inner_rows, pages, page_numbers, number, count, column, is_column, is_row, inner, b_stride,
    PAGES: tl.constexpr, IS_WHOLE: tl.constexpr, OUTPUTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The delta [BLOCK, OUTPUTS] of `column`. inner and pages: of the first PAGES pages."""
    RANKS: tl.constexpr = PAGES * 16
    rank = tl.arange(0, RANKS)
    b_tile = load_b(b + pages, number, count, column, is_column, PAGES, OUTPUTS)
    if UPCAST:
        b_tile = b_tile.to(tl.float32)
    total = tl.dot(inner.to(b_tile.dtype), tl.trans(b_tile), input_precision="ieee")
    if not IS_WHOLE:
        for start in tl.range(PAGES, count, PAGES, num_stages=1):
            last = count - start
            page = tl.load(page_numbers + start + number, mask=number < last, other=0).to(tl.int64) * b_stride
            more = tl.load(inner_rows + start * 16 + rank[None, :], mask=is_row & (rank < last * 16)[None, :], other=0.0)
            b_tile = load_b(b + page, number, last, column, is_column, PAGES, OUTPUTS)
            if UPCAST:
                b_tile = b_tile.to(tl.float32)
            total = tl.dot(more.to(b_tile.dtype), tl.trans(b_tile), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def expand_tall_kernel(
    product, shrunk, b, keys, rows, counts, place_pages, blocks, scales, has_scale, bias, out,
    num_rows, outputs, half, parts, num_experts, max_pages, product_stride, out_stride, b_stride,
    PAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # no adapter has more pages
    OUTPUTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr, HAS_EXPERTS: tl.constexpr, TOP: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of STEPS * OUTPUTS, tiles). Arguments as of `_expand_kernel`, whose `shrunk`
    has one split."""
    block = blocks + 3 * tl.program_id(0)
    first, end, part = tl.load(block) * UNIT, tl.load(block + 1) * UNIT, tl.load(block + 2)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    tile = tl.program_id(1)
    place, expert, row = find_tile(tile, keys, rows, num_experts, BLOCK, HAS_EXPERTS, TOP)
    if not IS_GATED:
        if place < 0:
            return
    elif tl.load(rows + tile * BLOCK) >= num_rows:
        return
    has_place = place >= 0
    number, rank = tl.arange(0, PAGES), tl.arange(0, PAGES * 16)
    page_numbers = place_pages + place * max_pages
    pages = tl.load(page_numbers + number, mask=number < tl.where(has_place, max_pages, 0), other=0).to(tl.int64) * b_stride
    count = tl.load(counts + place, mask=has_place, other=0)
    is_scaled = (tl.load(has_scale + place, mask=has_place, other=0) != 0) & (count > 0)
    if not IS_GATED:  # noqa: SIM102 - a constant
        if count == 0:
            return
    is_row = (row < num_rows)[:, None]
    row = row.to(tl.int64)
    b += tl.cast(expert, tl.int64) * outputs * 16
    inner_rows = shrunk + ((row * parts + part) * max_pages * 16)[:, None]
    has_rank = is_row & (rank < count * 16)[None, :]
    inner = tl.load(inner_rows + rank[None, :], mask=has_rank, other=0.0)
    if UPCAST:
        inner = inner.to(tl.float32)
    up_rows, up_inner = inner_rows, inner
    if IS_GATED:
        up_rows = inner_rows + max_pages * 16
        up_inner = tl.load(up_rows + rank[None, :], mask=has_rank, other=0.0)
        if UPCAST:
            up_inner = up_inner.to(tl.float32)
    scales += tl.cast(place, tl.int64) * outputs
    products, targets = product + row[:, None] * product_stride, out + row[:, None] * out_stride
    for start in tl.range(first, tl.minimum(end, first + STEPS * OUTPUTS), OUTPUTS, num_stages=STAGES):
        column = start + tl.arange(0, OUTPUTS)
        is_column = column < end
        inside = is_row & is_column[None, :]
        result = tl.load(products + column[None, :], mask=inside, other=0.0)
        if IS_GATED:
            up = tl.load(products + half + column[None, :], mask=inside, other=0.0)
        is_read = column < tl.where(count > 0, end, 0)
        total = _multiply(
            b, inner_rows, pages, page_numbers, number, count, column, is_read, is_row, inner, b_stride, PAGES, IS_WHOLE, OUTPUTS, UPCAST
        )
        result = add_delta(result, total, column, is_column, scales, bias, is_scaled, HAS_BIAS)
        if IS_GATED:
            up_total = _multiply(
                b, up_rows, pages, page_numbers, number, count, half + column, is_read, is_row, up_inner, b_stride,
                PAGES, IS_WHOLE, OUTPUTS, UPCAST,
            )  # fmt: skip
            up = add_delta(up, up_total, half + column, is_column, scales, bias, is_scaled, HAS_BIAS).to(tl.float32)
            gate = result.to(tl.float32)
            result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(targets + column[None, :], result.to(out.dtype.element_ty), mask=inside)
