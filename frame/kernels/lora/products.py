# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""The two products of low-rank deltas for tiles of rows of one adapter and expert: `shrink` (rows
times `a`, of embeddings `look_up`) and `expand` (that times `b`, added to a layer's outputs in
place).

Tiles of one row use the CUDA cores, larger ones the tensor cores. What a tile reads is found on the
device, from tables that a CUDA graph reads again at each replay. Both kernels take several pages at
a time. `shrink` splits the inputs over programs, so that few rows occupy the device: `expand` adds
the sums of tiles of one row, and of larger tiles the last program of a sum adds them and rounds.
For a gated layer `expand` may also compute the activation.
Used by `frame.adapters.triton_deltas`; depends on no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED
from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.lora.row_tiles import COUNTERS

_PAGES = 4  # at a time
_MAX_BLOCKS = 128  # of outputs, each with its programs; of more (LM heads), programs compute several
_PROGRAMS = 1024  # of the tiles of such a layer, about: most adapters leave it alone
_LARGE_SHARED_MEMORY = 200 << 10  # bytes: room for three loads of 64 rows and 64 columns, each 512 bytes


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """What one program of each product computes."""

    splits: int  # of the inputs, a power of two
    inputs: int  # at a time
    columns: int  # ranks of all parts that one program of `shrink` computes
    outputs: int  # of one program of `expand`
    shrink_warps: int = 4
    expand_warps: int = 4
    stages: int = 3  # loads of `shrink` under way
    registers: int | None = None  # of a thread of `expand` at most
    pages: int = 1  # that one program of `expand` takes at a time, and at most one of `shrink`; a power of two

    @property
    def shrink_pages(self) -> int:
        """That one program of `shrink` computes, of `columns / 16 / shrink_pages` parts."""
        return min(self.pages, self.columns // 16)

    @property
    def gated_outputs(self) -> int:
        """`outputs` of one program that has gates and what they multiply."""
        return max(16, self.outputs // 2)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of one key each. `block` 1: `keys` are the places of the rows, and `rows` their experts
    (or anything without experts); else these and `counters` are from `group_rows`."""

    keys: torch.Tensor
    rows: torch.Tensor
    block: int
    num_rows: int
    num_experts: int  # 0: without experts
    top: int = 1  # with `block` 1: consecutive rows that have one entry of `keys`
    counters: torch.Tensor | None = None  # int32 [tiles * COUNTERS] zeros, before and after each product

    @property
    def count(self) -> int:
        return len(self.keys) * self.top

    @property
    def constants(self) -> dict[str, object]:
        return {"BLOCK": self.block, "HAS_EXPERTS": self.num_experts > 0, "TOP": self.top, "UPCAST": INTERPRETED}


def choose_sizes(
    block: int, inputs: int, splits: tuple[int, ...], max_pages: int, value_bytes: int, shared_memory: int
) -> ProductSizes:  # fmt: skip
    """Sizes for tiles of `block` rows of a layer whose parts have `splits` outputs, and adapters of
    at most `max_pages` pages. shared_memory: of one program at most, in bytes."""
    is_large, is_long = sum(splits) > 8192, inputs > 8192
    outputs, pages = next_power_of_2(max(16, *splits)), min(_PAGES, next_power_of_2(max_pages))
    if block == 1:
        each = min(1024, next_power_of_2(ceil_div(inputs, 4)))
        warps, num_splits = 8 if each > 512 else 4, 8 if is_long else 4
        pages = 1 if is_large else pages  # of several pages, 8 rows of a large layer take longer
        wide = 256 if is_large else max(64, 128 // pages)
        return ProductSizes(num_splits, max(16, each), 16, min(wide, outputs), warps, stages=1, pages=pages)
    if block < 64:  # shared memory for two copies beside a kernel that streams a base weight
        num_splits = 8 if is_long or len(splits) > 2 else 4
        wide = max(256, 512 // pages) if is_large else max(128, 256 // pages)
        each = (512 if pages == 1 and block == 8 else 256) // value_bytes
        return ProductSizes(num_splits, each, 16 * pages, min(wide, outputs), expand_warps=8 if is_large else 4, pages=pages)
    columns = min(64, next_power_of_2(16 * len(splits)) * pages)
    loaded = 512 if shared_memory >= _LARGE_SHARED_MEMORY and columns == 64 else 256
    registers = 80 if value_bytes == 2 and pages == 1 else None  # three programs on a multiprocessor
    return ProductSizes(2, loaded // value_bytes, columns, min(128, outputs), expand_warps=8, registers=registers, pages=pages)


def list_blocks(splits: tuple[int, ...], outputs: int) -> tuple[list[tuple[int, int, int]], int]:
    """Blocks of at most `outputs` outputs that lie in one part each. -> [(first output, end of the
    part, part)], and the unit of the first two numbers: 16 if it divides all, else 1."""
    unit = 1 if any(size % 16 for size in splits) else 16
    blocks, first = [], 0
    for part, size in enumerate(splits):
        end = first + size
        blocks += [(start // unit, end // unit, part) for start in range(first, end, outputs)]
        first = end
    return blocks, unit


@triton.jit
def _find_tile(tile, keys, rows, num_experts, BLOCK: tl.constexpr, HAS_EXPERTS: tl.constexpr, TOP: tl.constexpr):
    """-> (place or -1, expert, rows [BLOCK])."""
    place = tl.load(keys + tile // TOP, eviction_policy="evict_last")
    expert = 0
    if BLOCK == 1:
        row = tile + tl.arange(0, 1)
        if HAS_EXPERTS:
            expert = tl.load(rows + tile).to(tl.int32)
    else:
        row = tl.load(rows + tile * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_last")
        if HAS_EXPERTS:
            expert = place % num_experts
            place = tl.where(place < 0, -1, place // num_experts)
    return place, expert, row


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x, a, keys, rows, counts, place_pages, partial, counters, out,
    num_rows, inputs, parts, num_experts, max_pages, x_stride, a_stride,
    split,  # inputs of one split, a multiple of INPUTS
    X_TOP: tl.constexpr,  # rows that read one row of x
    COLUMNS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, PAGES: tl.constexpr,
    SPLITS: tl.constexpr,  # whose sums the last program adds; 1: `out` has those of all programs
    SLOTS: tl.constexpr,  # counters of a tile
    BLOCK: tl.constexpr, HAS_EXPERTS: tl.constexpr, TOP: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of COLUMNS, tiles, splits). A block has PAGES pages of each of COLUMNS / 16 /
    PAGES parts; blocks of all parts of some pages follow each other."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    place, expert, row = _find_tile(tl.program_id(1), keys, rows, num_experts, BLOCK, HAS_EXPERTS, TOP)
    if place < 0:
        return
    PARTS: tl.constexpr = COLUMNS // 16 // PAGES
    blocks = (parts + PARTS - 1) // PARTS
    first_page = tl.program_id(0) // blocks * PAGES
    column = tl.arange(0, COLUMNS)
    part = tl.program_id(0) % blocks * PARTS + column // 16 // PAGES
    number = first_page + column // 16 % PAGES
    page = tl.load(place_pages + place * max_pages + number, mask=number < max_pages, other=0, eviction_policy="evict_last").to(tl.int64)
    count = tl.load(counts + place, eviction_policy="evict_last")
    if first_page >= count:
        return
    is_column = (part < parts) & (number < count)
    is_row = row < num_rows
    lanes = tl.arange(0, INPUTS)
    x_rows = x + (row // X_TOP).to(tl.int64)[:, None] * x_stride + lanes[None, :]
    a_row = (tl.cast(expert, tl.int64) * parts + part) * 16 + column % 16
    a_rows = a + (page * a_stride + a_row * inputs)[:, None] + lanes[None, :]
    IS_TALL: tl.constexpr = BLOCK >= 64  # the side of 64 rows comes first, as warp-group MMA requires
    total = tl.zeros([BLOCK, COLUMNS] if IS_TALL else [COLUMNS, BLOCK], tl.float32)
    start = tl.program_id(2) * split
    for first in tl.range(start, tl.minimum(start + split, inputs), INPUTS, num_stages=STAGES):
        inside = (first + lanes < inputs)[None, :]
        x_tile = tl.load(x_rows + first, mask=is_row[:, None] & inside, other=0.0)
        a_tile = tl.load(a_rows + first, mask=is_column[:, None] & inside, other=0.0)
        if UPCAST or BLOCK == 1:  # the interpreter multiplies bfloat16 incorrectly
            x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
        if BLOCK == 1:
            total += tl.sum(a_tile * x_tile, 1)[:, None]
        elif IS_TALL:
            total = tl.dot(x_tile, tl.trans(a_tile), total, input_precision="ieee")
        else:
            total = tl.dot(a_tile, tl.trans(x_tile), total, input_precision="ieee")
    if not IS_TALL:
        total = tl.trans(total)
    size = tl.cast(num_rows, tl.int64) * parts * max_pages * 16
    places = (row.to(tl.int64)[:, None] * parts + part[None, :]) * max_pages * 16 + (number * 16 + column % 16)[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if SPLITS == 1:
        tl.store(out + tl.program_id(2) * size + places, total.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + tl.program_id(2) * size + places, total, mask=mask)
        tl.debug_barrier()
        counter = counters + tl.program_id(1) * SLOTS + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([BLOCK, COLUMNS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(partial + other * size + places, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
            tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


def shrink(
    x: torch.Tensor, a: torch.Tensor, parts: int, tiles: Tiles, counts: torch.Tensor,
    place_pages: torch.Tensor, sizes: ProductSizes,
) -> torch.Tensor:  # fmt: skip
    """-> [splits, rows, parts, ranks], whose sum over the splits is the product: float32, or of
    tiles with `counters`, in the type of x and one split. x: of each row, or of each `tiles.top`
    rows. Other arguments as in `LayerPages`."""
    inputs, max_pages, splits = x.shape[1], place_pages.shape[1], sizes.splits
    blocks = ceil_div(max_pages, sizes.shrink_pages) * ceil_div(parts, sizes.columns // 16 // sizes.shrink_pages)
    if (is_summed := tiles.counters is not None) and blocks > COUNTERS:
        splits = 1
    shape = tiles.num_rows, parts, 16 * max_pages
    sums = x.new_empty((splits, *shape), dtype=torch.float32) if splits > 1 or not is_summed else x
    out = x.new_empty((1, *shape)) if is_summed else sums
    split = ceil_div(ceil_div(inputs, splits), sizes.inputs) * sizes.inputs
    _shrink_kernel[(blocks, tiles.count, splits)](
        x, a, tiles.keys, tiles.rows, counts, place_pages, sums, tiles.keys if tiles.counters is None else tiles.counters, out,
        tiles.num_rows, inputs, parts, max(1, tiles.num_experts), max_pages, x.stride(0), a.stride(0), split,
        X_TOP=max(1, tiles.num_rows // max(1, len(x))), COLUMNS=sizes.columns, INPUTS=sizes.inputs, STAGES=sizes.stages,
        PAGES=sizes.shrink_pages, SPLITS=splits if is_summed else 1, SLOTS=COUNTERS,
        **tiles.constants, **launch_options(x.device, sizes.shrink_warps),
    )  # fmt: skip
    return out


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
def _multiply_b(b_tile, inner, total, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """total [BLOCK, OUTPUTS] for tall tiles, else [OUTPUTS, BLOCK]: it and the product."""
    if UPCAST or BLOCK == 1:
        b_tile = b_tile.to(tl.float32)
    inner = inner.to(b_tile.dtype)
    if BLOCK == 1:
        total += tl.sum(b_tile * inner, 1)[:, None]
    elif BLOCK >= 64:
        total = tl.dot(inner, tl.trans(b_tile), total, input_precision="ieee")
    else:
        total = tl.dot(b_tile, tl.trans(inner), total, input_precision="ieee")
    return total


@triton.jit
def _add_delta(result, total, column, inside, scales, bias, is_scaled, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """result [BLOCK, OUTPUTS] and the delta `total`, scaled, in the type of `result`."""
    if BLOCK < 64:
        total = tl.trans(total)
    total = total.to(result.dtype).to(tl.float32) + result.to(tl.float32)
    if is_scaled:
        scale = tl.load(scales + column, mask=inside, other=0.0)[None, :]
        if HAS_BIAS:
            shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            total = (total - shift) * scale + shift
        else:
            total = total * scale
    return total.to(result.dtype)


@triton.jit
def _expand_block(
    product, shrunk, b, scales, bias, out,
    first, end, part,  # of the block
    row,  # int64 [BLOCK]
    is_row, page_numbers, first_page, count, is_scaled, half, parts, max_pages, product_stride, out_stride, b_stride, split_stride,
    SPLITS: tl.constexpr, PAGES: tl.constexpr, OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of outputs of a tile. b, scales: of the tile's place and expert."""
    RANKS: tl.constexpr = PAGES * 16
    column, rank, number = first + tl.arange(0, OUTPUTS), tl.arange(0, RANKS), tl.arange(0, PAGES)
    page, is_column = first_page, column < end
    inside = is_row & is_column[None, :]
    result_tile = product + row[:, None] * product_stride + column[None, :]
    result = tl.load(result_tile, mask=inside, other=0.0)  # before what depends on the page
    if IS_GATED:
        up = tl.load(result_tile + half, mask=inside, other=0.0)
    inner_rows = shrunk + ((row * parts + part) * max_pages * 16)[:, None] + rank[None, :]
    total = tl.zeros([BLOCK, OUTPUTS] if BLOCK >= 64 else [OUTPUTS, BLOCK], tl.float32)
    up_total = total
    for start in range(0, count, PAGES):
        pages = b + page.to(tl.int64) * b_stride
        has_rank = is_row
        if PAGES > 1:
            has_rank = is_row & (start * 16 + rank < count * 16)[None, :]
        b_tile = load_b(pages, number, count - start, column, is_column, PAGES, OUTPUTS)
        inner = sum_splits(inner_rows + start * 16, split_stride, has_rank, SPLITS, BLOCK, RANKS)
        if BLOCK >= 64:  # fewer registers
            total = _multiply_b(b_tile, inner, total, BLOCK, UPCAST)
        if IS_GATED:
            up_b_tile = load_b(pages, number, count - start, half + column, is_column, PAGES, OUTPUTS)
            up_inner = sum_splits(inner_rows + (max_pages + start) * 16, split_stride, has_rank, SPLITS, BLOCK, RANKS)
        if BLOCK < 64:  # all loads before the first product
            total = _multiply_b(b_tile, inner, total, BLOCK, UPCAST)
        if IS_GATED:
            up_total = _multiply_b(up_b_tile, up_inner, up_total, BLOCK, UPCAST)
        page = tl.load(page_numbers + start + PAGES + number, mask=start + PAGES + number < count, other=0)
    result = _add_delta(result, total, column, is_column, scales, bias, is_scaled, HAS_BIAS, BLOCK)
    if IS_GATED:
        up = _add_delta(up, up_total, half + column, is_column, scales, bias, is_scaled, HAS_BIAS, BLOCK).to(tl.float32)
        gate = result.to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row[:, None] * out_stride + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_block(blocks, index, UNIT: tl.constexpr):
    """(first output, end of its part, part) of a block."""
    block = blocks + 3 * index
    return tl.load(block) * UNIT, tl.load(block + 1) * UNIT, tl.load(block + 2)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    product, shrunk, b, keys, rows, counts, place_pages, blocks, scales, has_scale, bias, out,
    num_rows, outputs, half, parts, num_experts, max_pages, product_stride, out_stride, b_stride, num_blocks,
    SPLITS: tl.constexpr, PAGES: tl.constexpr, OUTPUTS: tl.constexpr, UNIT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_LOOPED: tl.constexpr, BLOCK: tl.constexpr, HAS_EXPERTS: tl.constexpr, TOP: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs that take turns at the blocks of OUTPUTS, tiles); IS_LOOPED: fewer programs
    than blocks. IS_GATED: outputs of the gate, each with the one `half` after it, also of rows
    without an adapter."""
    program = tl.program_id(0)
    first, end, part = _load_block(blocks, program, UNIT)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    tile = tl.program_id(1)
    place, expert, row = _find_tile(tile, keys, rows, num_experts, BLOCK, HAS_EXPERTS, TOP)
    if not IS_GATED:
        if place < 0:
            return
    elif BLOCK > 1:  # noqa: SIM102 - a constant
        if tl.load(rows + tile * BLOCK) >= num_rows:
            return
    has_place = place >= 0
    page_numbers = place_pages + place * max_pages
    number = tl.arange(0, PAGES)
    first_page = tl.load(page_numbers + number, mask=number < tl.where(has_place, max_pages, 0), other=0, eviction_policy="evict_last")
    count = tl.load(counts + place, mask=has_place, other=0, eviction_policy="evict_last")
    is_scaled = tl.load(has_scale + place, mask=has_place, other=0, eviction_policy="evict_last") != 0
    if not IS_GATED:  # noqa: SIM102 - a constant
        if count == 0:
            return
    b += tl.cast(expert, tl.int64) * outputs * 16
    scales += tl.cast(place, tl.int64) * outputs
    is_scaled &= count > 0
    is_row = (row < num_rows)[:, None]
    row = row.to(tl.int64)
    split_stride = tl.cast(num_rows, tl.int64) * parts * max_pages * 16
    if IS_LOOPED:
        for index in range(program, num_blocks, tl.num_programs(0)):
            _expand_block(
                product, shrunk, b, scales, bias, out, first, end, part, row, is_row, page_numbers, first_page, count, is_scaled,
                half, parts, max_pages, product_stride, out_stride, b_stride, split_stride,
                SPLITS, PAGES, OUTPUTS, HAS_BIAS, IS_GATED, BLOCK, UPCAST,
            )  # fmt: skip
            first, end, part = _load_block(blocks, tl.minimum(index + tl.num_programs(0), num_blocks - 1), UNIT)
    else:
        _expand_block(
            product, shrunk, b, scales, bias, out, first, end, part, row, is_row, page_numbers, first_page, count, is_scaled,
            half, parts, max_pages, product_stride, out_stride, b_stride, split_stride,
            SPLITS, PAGES, OUTPUTS, HAS_BIAS, IS_GATED, BLOCK, UPCAST,
        )  # fmt: skip


def expand(
    out: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, tiles: Tiles, counts: torch.Tensor, place_pages: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None, blocks: tuple[torch.Tensor, int], sizes: ProductSizes,
    gated: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Add the product of `shrunk` with `b` to `out` in place, then scale. scales: `scales` and
    `has_scale`. blocks: of `list_blocks`, the first on the device, int32 [blocks, 3].

    gated [rows, outputs // 2]: `out` is kept, and SiLU(first half of the result) * second half of
    all rows is written to `gated`, in the precision of `silu_mul`; `blocks` are those of the first
    half by `gated_outputs`."""
    table, unit = blocks
    target = out if gated is None else gated
    is_looped = len(table) > _MAX_BLOCKS
    programs = min(len(table), max(1, _PROGRAMS // tiles.count)) if is_looped else len(table)
    _expand_kernel[(programs, tiles.count)](
        out, shrunk, b, tiles.keys, tiles.rows, counts, place_pages, table, *scales, out if bias is None else bias, target,
        tiles.num_rows, out.shape[1], out.shape[1] // 2, shrunk.shape[2], max(1, tiles.num_experts), place_pages.shape[1],
        out.stride(0), target.stride(0), b.stride(0), len(table),
        SPLITS=len(shrunk), PAGES=sizes.pages, OUTPUTS=sizes.outputs if gated is None else sizes.gated_outputs, UNIT=unit,
        HAS_BIAS=bias is not None, IS_GATED=gated is not None, IS_LOOPED=is_looped,
        **tiles.constants, **launch_options(out.device, sizes.expand_warps), num_stages=1, maxnreg=sizes.registers,
    )  # fmt: skip


@triton.jit
def _look_up_kernel(
    ids, a, places, counts, place_pages, out, inputs, max_pages, a_stride, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,)."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    place, number = tl.load(places + row), tl.load(ids + row)
    rank = tl.arange(0, RANKS)
    is_local = (place >= 0) & (number >= 0) & (number < inputs)
    count = tl.load(counts + tl.maximum(place, 0))
    has_rank = rank < tl.where(is_local, count, 0) * 16
    page = tl.load(place_pages + place * max_pages + rank // 16, mask=has_rank, other=0).to(tl.int64)
    value = tl.load(a + page * a_stride + (rank % 16).to(tl.int64) * inputs + number, mask=has_rank, other=0.0)
    tl.store(out + tl.cast(row, tl.int64) * max_pages * 16 + rank, value, mask=rank < max_pages * 16)


def look_up(ids: torch.Tensor, a: torch.Tensor, places: torch.Tensor, counts: torch.Tensor, place_pages: torch.Tensor) -> torch.Tensor:
    """-> [rows, 1, ranks]: column `ids[row]` of `a` of the row's place, 0 for ids that `a` does not
    have. ids: int64 [rows]."""
    inputs, max_pages = a.shape[-1], place_pages.shape[1]
    out = a.new_empty(len(ids), 1, 16 * max_pages)
    _look_up_kernel[(len(ids),)](
        ids, a, places, counts, place_pages, out, inputs, max_pages, a.stride(0), RANKS=next_power_of_2(16 * max_pages),
        **launch_options(a.device, 1),
    )  # fmt: skip
    return out
