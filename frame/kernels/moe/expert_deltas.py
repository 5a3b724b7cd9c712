# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""What `experts_kernel` adds to its tile for rows with adapters, and the product with `a` for the
rows that it multiplies.

A tile has rows of one expert and of any adapters. A program treats the adapters of its tile one
after another, and the others' rows as zeros. Used by `expert_kernels` and
`frame.adapters.triton_deltas`. Must not know requests, files or the choice of tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.core.interfaces.adapter_layers import SortedPairs
from frame.kernels import INTERPRETED
from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.lora.products import load_b, sum_splits

_TALL = 64  # rows of a tile from which on it fills the device without splits
_SPLITS = 4  # of smaller tiles


@triton.jit
def _next_place(place_of, place):
    """The next smaller place of the tile's rows; -1: none."""
    return tl.max(tl.where(place_of < place, place_of, -1), 0)


@triton.jit
def _accumulate(inner, b_tile, acc, SWAP: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        b_tile = b_tile.to(tl.float32)
    inner = inner.to(b_tile.dtype)
    if SWAP:
        acc = tl.dot(b_tile, tl.trans(inner), acc, input_precision="ieee")
    else:
        acc = tl.dot(inner, tl.trans(b_tile), acc, input_precision="ieee")
    return acc


@triton.jit
def add_deltas(
    acc, up_acc, pairs, valid, expert, columns, is_column, shrunk, b, places, place_pages, counts, num_pairs, b_stride, max_pages,
    N: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, SPLITS: tl.constexpr, PAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The results of gates and ups [BM, BN], or [BN, BM] if SWAP, and the deltas of their rows.
    shrunk and others: of `PairDelta`; PAGES: that are multiplied at a time."""
    PARTS: tl.constexpr = 2 if GATED else 1
    number, rank = tl.arange(0, PAGES), tl.arange(0, PAGES * 16)
    place_of = tl.load(places + pairs // TOP, mask=valid, other=-1)
    inner_rows = shrunk + (pairs.to(tl.int64) * PARTS * max_pages * 16)[:, None] + rank[None, :]
    split_stride = num_pairs.to(tl.int64) * PARTS * max_pages * 16
    b += expert.to(tl.int64) * PARTS * N * 16
    place = tl.max(place_of, 0)
    while place >= 0:
        count = tl.load(counts + place)
        for start in tl.range(0, count, PAGES, num_stages=1):
            last = count - start
            page = tl.load(place_pages + place * max_pages + start + number, mask=number < last, other=0)
            pages = b + page.to(tl.int64) * b_stride
            has_rank = (place_of == place)[:, None] & (rank < last * 16)[None, :]
            b_tile = load_b(pages, number, last, columns, is_column, PAGES, BN)
            inner = sum_splits(inner_rows + start * 16, split_stride, has_rank, SPLITS, BM, PAGES * 16)
            acc = _accumulate(inner, b_tile, acc, SWAP, UPCAST)
            if GATED:
                b_tile = load_b(pages, number, last, N + columns, is_column, PAGES, BN)
                inner = sum_splits(inner_rows + (max_pages + start) * 16, split_stride, has_rank, SPLITS, BM, PAGES * 16)
                up_acc = _accumulate(inner, b_tile, up_acc, SWAP, UPCAST)
        place = _next_place(place_of, place)
    return acc, up_acc


@triton.jit(do_not_specialize=["num_pairs"])
def _shrink_kernel(
    x, a, pairs_of, experts_of, used, places, counts, place_pages, out,
    num_pairs, inputs, parts, max_pages, x_stride, a_stride, split,
    TOP: tl.constexpr,
    BY_TOKEN: tl.constexpr,  # x has a row for each token; else for each row of the order
    COLUMNS: tl.constexpr, PAGES: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of PAGES pages, blocks of the order, splits)."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    block = tl.program_id(1)
    if block >= tl.load(used):
        return
    expert = tl.load(experts_of + block).to(tl.int64)
    row = block * BLOCK + tl.arange(0, BLOCK)
    pairs = tl.load(pairs_of + row)
    valid = pairs < num_pairs
    place_of = tl.load(places + pairs // TOP, mask=valid, other=-1)
    source = tl.where(valid, pairs // TOP, 0) if BY_TOKEN else row
    lanes, column = tl.arange(0, INPUTS), tl.arange(0, COLUMNS)
    x_rows = x + source.to(tl.int64)[:, None] * x_stride + lanes[None, :]
    part, number = column // 16 // PAGES, tl.program_id(0) * PAGES + column // 16 % PAGES
    a_rows = a + ((expert * parts + part) * 16 + column % 16)[:, None] * inputs + lanes[None, :]
    out += tl.program_id(2).to(tl.int64) * num_pairs * parts * max_pages * 16
    targets = out + (pairs.to(tl.int64)[:, None] * parts + part[None, :]) * max_pages * 16 + (number * 16 + column % 16)[None, :]
    IS_TALL: tl.constexpr = BLOCK >= 64
    start = tl.program_id(2) * split
    stop = tl.minimum(start + split, inputs)
    place = tl.max(place_of, 0)
    while place >= 0:
        is_column = (part < parts) & (number < tl.load(counts + place))
        is_row = place_of == place
        page = tl.load(place_pages + place * max_pages + number, mask=is_column, other=0).to(tl.int64)
        a_pages = a_rows + (page * a_stride)[:, None]
        total = tl.zeros([BLOCK, COLUMNS] if IS_TALL else [COLUMNS, BLOCK], tl.float32)
        for first in tl.range(start, stop, INPUTS, num_stages=STAGES):
            inside = (first + lanes < inputs)[None, :]
            x_tile = tl.load(x_rows + first, mask=is_row[:, None] & inside, other=0.0)
            a_tile = tl.load(a_pages + first, mask=is_column[:, None] & inside, other=0.0)
            if UPCAST:
                x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
            if IS_TALL:
                total = tl.dot(x_tile, tl.trans(a_tile), total, input_precision="ieee")
            else:
                total = tl.dot(a_tile, tl.trans(x_tile), total, input_precision="ieee")
        if not IS_TALL:
            total = tl.trans(total)
        tl.store(targets, total, mask=is_row[:, None] & is_column[None, :])
        place = _next_place(place_of, place)


def shrink_sorted(
    x: torch.Tensor, a: torch.Tensor, parts: int, order: SortedPairs, places: torch.Tensor, shape: tuple[int, int],
    counts: torch.Tensor, place_pages: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """-> `PairDelta.shrunk`. a: as in `LayerPages`; places int32: of the tokens; shape: tokens, and
    pairs of each."""
    inputs, max_pages, (tokens, top) = x.shape[1], place_pages.shape[1], shape
    num_pairs = tokens * top
    pages = 1 if parts > 2 else min(64 // 16 // next_power_of_2(parts), next_power_of_2(max_pages))
    splits = _SPLITS if order.block < _TALL else 1
    each = (128 if order.block >= _TALL else 256) // x.element_size()
    out = torch.empty((splits, num_pairs, parts, 16 * max_pages), dtype=torch.float32, device=x.device)
    _shrink_kernel[(ceil_div(max_pages, pages), len(order.experts), splits)](
        x, a, order.pairs, order.experts, order.used, places, counts, place_pages, out,
        num_pairs, inputs, parts, max_pages, x.stride(0), a.stride(0), ceil_div(ceil_div(inputs, splits), each) * each,
        TOP=top, BY_TOKEN=not order.by_row, COLUMNS=16 * next_power_of_2(parts) * pages, PAGES=pages, INPUTS=each, STAGES=3,
        BLOCK=order.block, UPCAST=INTERPRETED, **launch_options(x.device, 4),
    )  # fmt: skip
    return out
