# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Groups rows by adapter and expert into tiles, whose number does not depend on the values, so that
a CUDA graph can capture it.

A row's key is place * experts + expert. Used by `frame.adapters.triton_deltas`; depends on no
weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import launch_dependents, launch_options, wait_for_previous

COUNTERS = 32  # of each tile, for the programs that add up a product's splits
SORTED_ROWS = 64, 512  # rows that one program sorts; PyTorch sorts more
_FEW_ROWS, _FEW_PAIRS = 8, 32  # that are cheaper one by one than sorted
_MANY_ROWS = 512  # that fill tiles of 64, with as many for each expert as half a tile


def choose_block(num_rows: int, num_places: int, num_experts: int) -> int:
    """Rows of a tile: 1, 8, 16, 32 or 64. A larger tile reads an adapter's weights for more rows at
    once, but computes all its rows, so it is about twice the rows of each of many adapters."""
    if num_rows <= (_FEW_PAIRS if num_experts else _FEW_ROWS):
        return 1
    if num_rows >= max(_MANY_ROWS, 32 * num_experts):
        return 64
    each = 0 if num_experts else num_rows // num_places
    return 8 if each < 8 else 16 if each < 32 else 32


def group_rows(
    places: torch.Tensor, experts: torch.Tensor | None, num_places: int, num_experts: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> int32 [tiles] the key of each tile, -1 for an unused one; int32 [tiles * block] its rows,
    `len(places)` for none; int32 [tiles * COUNTERS] zeros, which products use. Rows whose place is
    -1 are in tiles of the key -1, so each row is in one tile. The rows of a tile come before the
    lanes without one, and unused tiles come last, whose programs then delay no others. Many rows
    are backwards: in a long prompt, the last ones are still in the L2 cache."""
    num_rows, num_keys = len(places), num_places * max(1, num_experts)
    groups = min(num_keys + 1, num_rows)
    num_tiles = groups + (num_rows - groups) // block
    keys, rows = places.new_empty(num_tiles), places.new_empty(num_tiles * block)
    counters = places.new_empty(num_tiles * COUNTERS)
    if num_rows > SORTED_ROWS[-1]:
        row_keys = places if experts is None else torch.where(places < 0, -1, places * num_experts + experts).int()
        row_keys, order = row_keys.sort()
        lanes = torch.arange(num_rows, device=places.device) - torch.searchsorted(row_keys, row_keys)  # in the rows of the key
        tiles = (lanes % block == 0).cumsum(0)
        tiles = tiles[-1] - tiles
        keys.fill_(-1)[tiles] = row_keys
        rows.fill_(num_rows)[tiles * block + lanes % block] = order.int()
        return keys, rows, counters.zero_()
    _sort_kernel[(1,)](
        places, places if experts is None else experts, keys, rows, counters, num_rows, num_keys, max(1, num_experts), num_tiles,
        LANES=next(size for size in SORTED_ROWS if num_rows <= size), SLOTS=COUNTERS, BLOCK=block, HAS_EXPERTS=experts is not None,
        **launch_options(places.device, 4),
    )  # fmt: skip
    return keys, rows, counters


@triton.jit
def _join_runs(left_key, left, right_key, right):
    """The last key of two neighbouring ranges of sorted keys, and the length of its run."""
    return right_key, tl.where(left_key == right_key, left + right, right)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_experts", "num_tiles"])
def _sort_kernel(
    places, experts, keys, rows, counters, num_rows, num_keys, num_experts, num_tiles,
    LANES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, HAS_EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: one program."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    lanes = tl.arange(0, LANES)
    key = tl.load(places + lanes, mask=lanes < num_rows, other=-1)
    is_active = key >= 0
    if HAS_EXPERTS:
        key = key * num_experts + tl.load(experts + lanes, mask=lanes < num_rows, other=0).to(tl.int32)
    order = tl.sort(tl.where(is_active, key, num_keys) * LANES + lanes)  # fits: a few million keys of int32 at 512 rows
    key = order // LANES
    _, length = tl.associative_scan((key, tl.full([LANES], 1, tl.int32)), 0, _join_runs)
    lane = length - 1
    is_row = order % LANES < num_rows  # the other lanes are the last of the rows without an adapter
    is_first = is_row & (lane % BLOCK == 0)
    tile = tl.cumsum(is_first.to(tl.int32), 0) - 1
    for start in range(0, num_tiles, LANES):
        tl.store(keys + start + lanes, tl.full([LANES], -1, tl.int32), mask=start + lanes < num_tiles)
    for start in range(0, num_tiles * BLOCK, LANES):
        tl.store(rows + start + lanes, tl.zeros([LANES], tl.int32) + num_rows, mask=start + lanes < num_tiles * BLOCK)
    for start in range(0, num_tiles * SLOTS, LANES):
        tl.store(counters + start + lanes, tl.zeros([LANES], tl.int32), mask=start + lanes < num_tiles * SLOTS)
    tl.debug_barrier()  # the stores of other threads come first
    tl.store(keys + tile, tl.where(key < num_keys, key, -1), mask=is_first)
    tl.store(rows + tile * BLOCK + lane % BLOCK, order % LANES, mask=is_row)
