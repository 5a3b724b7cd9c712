"""Kernel that writes FlashInfer's CSR page lists: indices, row starts, and the fill of each row's
last page.

Depends on page tables only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNKS = 8  # programs per row
ENTRIES = 256  # table entries that a program copies at a time


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["slots", "lengths", "starts", "last_page", "pages"],  # slices that start at any row
)
def page_lists_kernel(
    table,
    slots,
    lengths,
    starts,
    last_page,
    pages,
    num_rows,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, CHUNKS). Every program sums the page counts of the rows before its own, a few
    hundred at most."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, row, BLOCK):
        others = first + tl.arange(0, BLOCK)
        other = tl.load(lengths + others, mask=others < row, other=0)
        before += (other + PAGE_SIZE - 1) // PAGE_SIZE
    start = tl.sum(before, 0)
    length = tl.load(lengths + row)
    count = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if chunk == 0:
        tl.store(starts + row, start)
        tl.store(last_page + row, length - (count - 1) * PAGE_SIZE)
        if row == num_rows - 1:
            tl.store(starts + num_rows, start + count)
    source = table + tl.load(slots + row) * table_stride
    for first in range(chunk * BLOCK, count, BLOCK * tl.num_programs(1)):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < count
        tl.store(pages + start + columns, tl.load(source + columns, mask=inside, other=0), mask=inside)


def write_page_lists(
    table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    last_page: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> None:
    """table int32 [slots, pages], slots int64 [rows], lengths int32 [rows] -> starts int32 [rows +
    1], last_page int32 [rows], and the rows' pages, concatenated, in `pages` int32, which is large
    enough. One launch; does not wait for the device."""
    rows = lengths.shape[0]
    page_lists_kernel[rows, CHUNKS](
        table, slots, lengths, starts, last_page, pages, rows, table.stride(0), PAGE_SIZE=page_size, BLOCK=ENTRIES, num_warps=4
    )
