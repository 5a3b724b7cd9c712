"""Pages of tensors of several widths to blocks and back.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from frame.kernels import INTERPRETED
from frame.kernels.page_blocks import copy_blocks

DEVICE = "cpu" if INTERPRETED else "cuda"
PAGES = [7, 2, 9]


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_pages_become_blocks_and_blocks_become_pages(unit: int) -> None:
    """The bytes between two tensors of a block, columns beside a piece of a page, and pages that
    are not named, stay as they are."""
    generator = torch.Generator().manual_seed(unit)
    widths = (3 * unit, 5000 * unit)
    extra = (0, 16 * unit)
    shapes = [(10, width + more) for width, more in zip(widths, extra, strict=True)]
    whole = [torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(DEVICE) for shape in shapes]
    tensors = [each[:, each.shape[1] - width :] for each, width in zip(whole, widths, strict=True)]
    offsets, block_bytes = (0, widths[0] + unit), sum(widths) + 2 * unit
    rows = [
        (each.data_ptr(), width // unit, offset // unit, each.stride(0) // unit)
        for each, width, offset in zip(tensors, widths, offsets, strict=True)
    ]
    table, pages = torch.tensor(rows, device=DEVICE), torch.tensor(PAGES, device=DEVICE)
    blocks = torch.full((5, block_bytes), 17, dtype=torch.uint8, device=DEVICE)
    expected = blocks.clone()
    for each, width, offset in zip(tensors, widths, offsets, strict=True):
        expected[: len(PAGES), offset : offset + width] = each[PAGES]
    addresses = torch.tensor([block.data_ptr() for block in blocks[: len(PAGES)]], device=DEVICE)
    copy_blocks(addresses, pages, table, unit, 5000, is_store=True)
    assert torch.equal(blocks, expected)

    contents = [each.clone() for each in whole]
    for each in tensors:
        each[PAGES] = 0
    copy_blocks(addresses, pages, table, unit, 5000, is_store=False)
    for each, content in zip(whole, contents, strict=True):
        assert torch.equal(each, content)
