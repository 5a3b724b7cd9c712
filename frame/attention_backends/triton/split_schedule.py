# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Divides the decodes of one step into items of about equal cost, on the device, from the rows'
lengths (load-balanced split-KV, as in FlashDecoding and FlashInfer's planning).

Because the device computes the schedule, a captured graph serves rows of any length: its grid has
room for the largest number of items, and unused programs return at once. An item is a run of one
row's suffix, or of a prefix that a tile of rows shares. Layers of equal shape and window share a
step's schedule. Depends on no query, key or value tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from frame.attention_backends.triton.shared_prefixes import MIN_ROWS

# A schedule is one int32 tensor: header (number of items, number of shared items); 8 per row (first
# suffix item, suffix items, first shared item, shared items, position in its tile); 8 per item
# (row, or first index in the order of shared rows; page-table row; first key; last key + 1; rows of
# the tile, or tokens of one request; position of the first of these); 1 arrival counter per row and
# block of heads, zero between launches. With shares: header (number of items, 0, number of shares),
# and as an item's fifth number the first item of the share of the same index.
HEADER, ROW, ITEM = tl.constexpr(8), tl.constexpr(8), tl.constexpr(8)
CLASSES = tl.constexpr(8)  # classes of pieces by length
# What a row costs besides its keys (queries, result), in blocks of keys, where there are many rows
ROW_COST = tl.constexpr(2)
MAX_PIECES = tl.constexpr(64)  # of a row that is divided into shares, about; the merge reads four after four


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How the decodes of one layer shape are divided. A schedule depends on this and on the
    batch."""

    capacity: int  # most rows of a step; fixes the layout of the schedule tensor
    heads: int  # query heads
    blocks: int  # programs per item
    target: int  # items that run concurrently
    min_keys: int  # keys of a piece at least
    block_keys: int  # pieces start at multiples of it
    window: int  # negative: chunks of so many keys
    tile_rows: int  # rows per tile of a shared prefix; 0: prefixes are not shared
    tokens: int = 1  # consecutive rows at most, of consecutive tokens of one request, that are divided as one row
    shares: int = 0  # programs per block of heads at most, each of which takes consecutive items; 0: one program per item

    def count_tiles(self, rows: int) -> int:
        """Most tiles of rows that share a prefix."""
        return rows // self.tile_rows + rows // MIN_ROWS if self.tile_rows else 0

    def count_pieces(self, rows: int) -> tuple[int, int, int]:
        """(pieces of all rows' keys, about; the same where tiles share prefixes, which work longer
        on each key; most items besides one per row).

        Few rows get one wave of programs, since a second wave would not be full. More rows are
        divided more finely, so that little is left at the end.
        """
        if 2 * rows <= self.target:
            return self.target - rows, self.target - rows, self.target - rows
        return 2 * self.target, self.target, max(2 * self.target, self.count_tiles(rows) + self.target)

    def count_items(self, rows: int) -> int:
        """Most items: one per row, and the pieces and tiles beyond that."""
        return rows + (self.shares or self.count_pieces(rows)[2])

    @property
    def max_suffix_items(self) -> int:
        return self.capacity + 2 * self.target

    @property
    def max_shared_items(self) -> int:
        return self.count_tiles(self.capacity) + 2 * self.target if self.tile_rows else 0


@triton.jit
def split_keys(keys, split, BLOCK_KEYS: tl.constexpr):
    """(pieces, keys of each but the last). A piece may be a quarter longer than `split`, to avoid a
    short last piece."""
    pieces = tl.maximum(1, tl.cdiv(keys - split // 4, split))
    length = tl.maximum(1, tl.cdiv(tl.cdiv(keys, pieces), BLOCK_KEYS)) * BLOCK_KEYS
    return tl.cdiv(keys, length), length


@triton.jit
def greater(one, other):
    return tl.maximum(one, other)


@triton.jit
def is_next(seq_lens, request_slots, begins, rows, ahead, num_rows, TILE_ROWS: tl.constexpr):
    """Whether the row `ahead` rows later is the token so far later of the same request, and neither
    shares a prefix with other rows."""
    valid = (rows >= 0) & (rows + ahead < num_rows)
    same = tl.load(request_slots + rows, mask=valid, other=0) == tl.load(request_slots + rows + ahead, mask=valid, other=0)
    apart = tl.load(seq_lens + rows + ahead, mask=valid, other=0) - tl.load(seq_lens + rows, mask=valid, other=0)
    if TILE_ROWS > 0:
        same &= (tl.load(begins + rows, mask=valid, other=0) == 0) & (tl.load(begins + rows + ahead, mask=valid, other=0) == 0)
    return valid & same & (apart == ahead)


@triton.jit
def count_tokens(seq_lens, request_slots, begins, rows, num_rows, TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """The rows from each one on that are divided as one row; 0 where those of an earlier one
    include it."""
    goes_on = is_next(seq_lens, request_slots, begins, rows - 1, 1, num_rows, TILE_ROWS)
    starts = tl.associative_scan(tl.where(goes_on, 0, rows), 0, greater)
    counts = tl.full(rows.shape, 1, tl.int32)
    for ahead in tl.static_range(1, TOKENS):
        counts += tl.where(is_next(seq_lens, request_slots, begins, rows, ahead, num_rows, TILE_ROWS), 1, 0)
    return tl.where((rows < num_rows) & ((rows - starts) % TOKENS == 0), counts, 0)


@triton.jit
def divide_evenly(
    schedule, item_records, row_records, rows, slot, keys, num_rows, BLOCK_KEYS: tl.constexpr, MIN_KEYS: tl.constexpr, SHARES: tl.constexpr
):
    """Divide all rows, one after another, into SHARES runs of equal cost, as FlashMLA does; an item
    is a row's piece of a run. Returns the number of items."""
    blocks = tl.cdiv(keys, BLOCK_KEYS)
    row_cost = tl.where(2 * num_rows > SHARES, ROW_COST, 0)
    cost = tl.where(blocks > 0, blocks + row_cost, 0)
    stop = tl.cumsum(cost, 0)
    start, first_block = stop - cost, stop - blocks
    total = tl.sum(cost, 0)
    minimum = tl.maximum(MIN_KEYS // BLOCK_KEYS, tl.cdiv(tl.max(blocks, 0), MAX_PIECES))
    share = tl.maximum(tl.cdiv(total, SHARES), minimum + row_cost)
    share_of_first = first_block // share
    count = tl.where(blocks > 0, (stop - 1) // share - share_of_first + 1, 0)
    first = tl.cumsum(count, 0) - count
    begins_share = (start == 0) | ((start - 1) // share < share_of_first)
    tl.store(row_records, first, mask=rows < num_rows)
    tl.store(row_records + 1, count, mask=rows < num_rows)
    for number in range(tl.max(count, 0)):
        used = number < count
        at = share_of_first + number
        item = item_records + (first + number) * ITEM
        tl.store(item, rows, mask=used)
        tl.store(item + 1, slot, mask=used)
        tl.store(item + 2, tl.maximum(0, at * share - first_block) * BLOCK_KEYS, mask=used)
        tl.store(item + 3, tl.minimum(keys, ((at + 1) * share - first_block) * BLOCK_KEYS), mask=used)
        tl.store(item_records + at * ITEM + 4, first + number, mask=used & (begins_share | (number > 0)))
    tl.store(schedule + 2, tl.cdiv(total, share))
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_rows", "capacity", "max_items", "pieces", "tiled_pieces", "max_pieces"])
def schedule_kernel(
    schedule, seq_lens, request_slots,
    prefixes,  # int32 [5, capacity], see `shared_prefixes.py`
    num_rows, capacity, max_items, pieces, tiled_pieces,
    max_pieces,  # pieces and tiles of shared prefixes together, at most
    BLOCK_ROWS: tl.constexpr, BLOCKS: tl.constexpr, MIN_KEYS: tl.constexpr, BLOCK_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr, TOKENS: tl.constexpr, SHARES: tl.constexpr, BLOCK_ARRIVALS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_ROWS)
    valid = rows < num_rows
    seq_len = tl.load(seq_lens + rows, mask=valid, other=0)
    slot = tl.load(request_slots + rows, mask=valid, other=0).to(tl.int32)
    begin = tl.zeros([BLOCK_ROWS], tl.int32)
    if WINDOW > 0:
        begin = tl.maximum(0, seq_len - WINDOW)
    elif WINDOW < 0:  # chunks of -WINDOW keys
        begin = tl.maximum(0, seq_len - 1) // -WINDOW * -WINDOW
    row_records = schedule + HEADER + rows * ROW
    item_records = schedule + HEADER + capacity * ROW
    num_shared = 0
    if TILE_ROWS > 0:
        begin = tl.load(prefixes + rows, mask=valid, other=0)
    end = seq_len
    suffix = seq_len - begin
    tokens = tl.full([BLOCK_ROWS], 1, tl.int32)
    if TOKENS > 1:
        tokens = count_tokens(seq_lens, request_slots, prefixes, rows, num_rows, TOKENS, TILE_ROWS)
        end = seq_len + tokens - 1
        suffix = tl.where(tokens > 0, end - begin, 0)
    total = tl.sum(suffix, 0)
    split = tl.maximum(MIN_KEYS, tl.cdiv(total, pieces))
    if TILE_ROWS > 0:
        place = tl.load(prefixes + capacity + rows, mask=valid, other=0)
        position = tl.load(prefixes + 2 * capacity + rows, mask=valid, other=0)
        group = tl.load(prefixes + 3 * capacity + rows, mask=valid, other=0)
        within = position % TILE_ROWS
        leads = (begin > 0) & (within == 0)
        total += tl.sum(tl.where(leads, begin, 0), 0)
        num_tiles = tl.sum(leads.to(tl.int32), 0)
        if num_tiles > 0:
            pieces = tl.minimum(tiled_pieces, max_pieces - num_tiles)
        split = tl.maximum(MIN_KEYS, tl.cdiv(total, pieces))
        count, length = split_keys(begin, split, BLOCK_KEYS)
        counts = tl.where(leads, count, 0)
        first = tl.cumsum(counts, 0) - counts
        num_shared = tl.sum(counts, 0)
        tl.store(row_records + 2, first, mask=valid)
        tl.debug_barrier()
        leader = tl.load(prefixes + 4 * capacity + place - within, mask=valid & (begin > 0), other=0)
        tl.debug_barrier()
        tl.store(row_records + 2, tl.load(schedule + HEADER + leader * ROW + 2, mask=valid, other=0), mask=valid & ~leads)
        tl.store(row_records + 3, tl.where(begin > 0, count, 0), mask=valid)
        tl.store(row_records + 4, within, mask=valid)
        for number in range(tl.max(counts, 0)):
            used = leads & (number < counts)
            item = item_records + (first + number) * ITEM
            tl.store(item, place, mask=used)
            tl.store(item + 1, slot, mask=used)
            tl.store(item + 2, number * length, mask=used)
            tl.store(item + 3, tl.minimum(begin, (number + 1) * length), mask=used)
            tl.store(item + 4, tl.minimum(group - position, TILE_ROWS), mask=used)
    else:
        tl.store(row_records + 3, tl.zeros([BLOCK_ROWS], tl.int32), mask=valid)
    if SHARES > 0:
        taken = divide_evenly(schedule, item_records, row_records, rows, slot, suffix, num_rows, BLOCK_KEYS, MIN_KEYS, SHARES)
    else:
        count, length = split_keys(suffix, split, BLOCK_KEYS)
        count = tl.where(valid, count, 0)
        # long pieces start first, so that short ones fill the gaps at the end
        piece = tl.minimum(suffix, length)
        rank = tl.minimum(CLASSES - 1, piece * CLASSES // (tl.max(piece, 0) + 1))
        first = tl.zeros([BLOCK_ROWS], tl.int32)
        taken = 0
        for step in range(CLASSES):
            of_class = tl.where(rank == CLASSES - 1 - step, count, 0)
            first = tl.where(rank == CLASSES - 1 - step, taken + tl.cumsum(of_class, 0) - of_class, first)
            taken += tl.sum(of_class, 0)
        tl.store(row_records, first, mask=valid)
        tl.store(row_records + 1, count, mask=valid)
        for number in range(tl.max(count, 0)):
            used = number < count
            item = item_records + (num_shared + first + number) * ITEM
            tl.store(item, rows, mask=used)
            tl.store(item + 1, slot, mask=used)
            tl.store(item + 2, begin + number * length, mask=used)
            tl.store(item + 3, tl.minimum(end, begin + (number + 1) * length), mask=used)
            if TOKENS > 1:
                tl.store(item + 4, tokens, mask=used)
                tl.store(item + 5, seq_len - 1, mask=used)
    tl.store(schedule, num_shared + taken)
    tl.store(schedule + 1, num_shared)
    for start in range(0, num_rows * BLOCKS, BLOCK_ARRIVALS):
        arrivals = start + tl.arange(0, BLOCK_ARRIVALS)
        tl.store(item_records + max_items * ITEM + arrivals, tl.zeros([BLOCK_ARRIVALS], tl.int32), mask=arrivals < num_rows * BLOCKS)


def make_schedule(
    config: SplitConfig, rows: int, seq_lens: torch.Tensor, request_slots: torch.Tensor, prefixes: torch.Tensor, pdl: bool
) -> torch.Tensor:
    """The schedule of the first `rows` rows. seq_lens int32, request_slots int64, prefixes int32
    [5, capacity]."""
    maximum = config.count_items(config.capacity)
    size = HEADER.value + config.capacity * (ROW.value + config.blocks) + maximum * ITEM.value
    schedule = torch.empty(size, dtype=torch.int32, device=seq_lens.device)
    schedule_kernel[(1,)](
        schedule, seq_lens, request_slots, prefixes, rows, config.capacity, maximum, *config.count_pieces(rows),
        BLOCK_ROWS=max(16, triton.next_power_of_2(rows)), BLOCKS=config.blocks, MIN_KEYS=config.min_keys,
        BLOCK_KEYS=config.block_keys, WINDOW=config.window, TILE_ROWS=config.tile_rows, TOKENS=config.tokens,
        SHARES=config.shares, BLOCK_ARRIVALS=1024, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return schedule
