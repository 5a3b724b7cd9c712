# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Copies pages of many tensors to and from contiguous blocks, in one launch for each width of a
copy. Used by the mover of KV tiers. Must not know a layer or a tier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import next_power_of_2

_MAX_UNITS = 2048  # that one iteration of a program copies


@triton.jit(do_not_specialize_on_alignment=["blocks", "pages"])  # parts of one tensor: a variant for each would be compiled
def _copy_kernel(blocks, pages, table, UNIT: tl.constexpr, STORE: tl.constexpr, SIZE: tl.constexpr):
    """Grid: (pages, tensors). A program copies one page of one tensor. Addresses are computed in
    int64: a tensor has more than 2^31 bytes."""
    row = table + tl.program_id(1) * 4
    width, offset = tl.load(row + 1), tl.load(row + 2)
    page = tl.load(pages + tl.program_id(0))
    inside = tl.load(row).to(tl.pointer_type(UNIT)) + page * tl.load(row + 3)
    block = tl.load(blocks + tl.program_id(0)).to(tl.pointer_type(UNIT)) + offset
    for start in range(0, width, SIZE):
        units = start + tl.arange(0, SIZE)
        if STORE:
            tl.store(block + units, tl.load(inside + units, mask=units < width), mask=units < width)
        else:
            tl.store(inside + units, tl.load(block + units, mask=units < width), mask=units < width)


_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def copy_blocks(blocks: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, unit: int, max_width: int, *, is_store: bool) -> None:
    """Copy pages to blocks (`is_store`) or blocks to pages.

    blocks: their addresses, int64 [n]. pages: int64 [n]. table: int64 [tensors, 4] of (address,
    width of a page, offset in a block, width from page to page), the last three in units of `unit`
    bytes (8, 4, 2 or 1), which divides all addresses. max_width: the largest width.
    """
    size = min(next_power_of_2(max_width), _MAX_UNITS)
    grid = len(pages), len(table)
    _copy_kernel[grid](blocks, pages, table, UNIT=_TYPES[unit], STORE=is_store, SIZE=size)
