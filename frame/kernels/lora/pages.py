# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""What the kernels of low-rank deltas read of a tile and of an adapter's pages.

Used by `products`, `tall_expand` and the kernels of experts; depends on no layer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(tile, keys, rows, num_experts, BLOCK: tl.constexpr, HAS_EXPERTS: tl.constexpr, TOP: tl.constexpr):
    """-> (place or -1, expert, rows [BLOCK])."""
    place = tl.load(keys + tile // TOP)
    expert = 0
    if BLOCK == 1:
        row = tile + tl.arange(0, 1)
        if HAS_EXPERTS:
            expert = tl.load(rows + tile).to(tl.int32)
    else:
        row = tl.load(rows + tile * BLOCK + tl.arange(0, BLOCK))
        if HAS_EXPERTS:
            expert = place % num_experts
            place = tl.where(place < 0, -1, place // num_experts)
    return place, expert, row


@triton.jit
def load_b(pages, number, last, column, is_column, PAGES: tl.constexpr, OUTPUTS: tl.constexpr):
    """[OUTPUTS, PAGES * 16] of pages that begin at `pages` [PAGES], of which the first `last` > 0
    are read; zeros for the others."""
    rank = tl.arange(0, 16)
    places = pages[None, :, None] + (column.to(tl.int64) * 16)[:, None, None] + rank[None, None, :]
    mask = is_column[:, None, None]
    if PAGES > 1:
        mask = mask & (number < last)[None, :, None]
    tile = tl.load(places, mask=mask, other=0.0)
    return tl.reshape(tile, [OUTPUTS, PAGES * 16])


@triton.jit
def sum_splits(rows, stride, mask, SPLITS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    """What `shrink` computed of RANKS ranks [BLOCK, RANKS]."""
    if SPLITS == 1:
        inner = tl.load(rows, mask=mask, other=0.0)
    else:
        inner = tl.zeros([BLOCK, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            inner += tl.load(rows + stride * split, mask=mask, other=0.0)
    return inner


@triton.jit
def add_delta(result, total, column, inside, scales, bias, is_scaled, HAS_BIAS: tl.constexpr):
    """result [BLOCK, OUTPUTS] and the delta `total`, scaled, in the type of `result`."""
    total = total.to(result.dtype).to(tl.float32) + result.to(tl.float32)
    if is_scaled:
        scale = tl.load(scales + column, mask=inside, other=0.0)[None, :]
        if HAS_BIAS:
            shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            total = (total - shift) * scale + shift
        else:
            total = total * scale
    return total.to(result.dtype)
