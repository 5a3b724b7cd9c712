# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Copies rows within several tensors in one launch: the keys and values of accepted tokens of
trees. Used by the KV pool. Must not know a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import next_power_of_2


@triton.jit
def _move_kernel(addresses, sources, targets, first, counts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (tensors, runs). A thread copies the same columns of all rows of a run, one after the
    other, and no source is before the target of the same row: a row is read before it is
    written."""
    rows = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int16))
    start = tl.load(first + tl.program_id(1))
    columns = tl.arange(0, BLOCK)
    for index in range(start, start + tl.load(counts + tl.program_id(1))):
        source, target = tl.load(sources + index), tl.load(targets + index)
        if source != target:
            row = tl.load(rows + source * WIDTH + columns, mask=columns < WIDTH)
            tl.store(rows + target * WIDTH + columns, row, mask=columns < WIDTH)


def move_rows(
    addresses: torch.Tensor, width: int, sources: torch.Tensor, targets: torch.Tensor, first: torch.Tensor, counts: torch.Tensor
) -> None:
    """Copy rows of `width` bytes, an even number. addresses: int64 [tensors], on the device.
    sources, targets: int64 [n], rows; first, counts: int64 [runs], the part of them of each
    run."""
    width //= 2
    grid = len(addresses), len(first)
    _move_kernel[grid](addresses, sources, targets, first, counts, WIDTH=width, BLOCK=next_power_of_2(width))
