"""Rows of several tensors that move within runs to earlier places.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

import torch

from frame.kernels import INTERPRETED
from frame.kernels.row_moves import move_rows

DEVICE = "cpu" if INTERPRETED else "cuda"


def test_rows_move_in_order() -> None:
    """A row that is overwritten has been read before. The rest of a run has no effect."""
    tensors = [torch.randn(20, 3, 7, generator=torch.Generator().manual_seed(index)).to(DEVICE, torch.bfloat16) for index in range(3)]
    expected = [each.clone() for each in tensors]
    runs = [([9, 10, 11, 12], [9, 11, 12, 3], 3), ([4, 1, 2], [4, 1, 7], 1), ([15, 16], [15, 18], 2)]  # targets, sources, count
    for each, plain in zip(tensors, expected, strict=True):
        for targets, sources, count in runs:
            plain[targets[:count]] = each[sources[:count]]
    targets, sources = ([slot for run in runs for slot in run[index]] for index in (0, 1))  # type: ignore[attr-defined]
    numbers = [torch.tensor(each, device=DEVICE) for each in (sources, targets, [0, 4, 7], [run[2] for run in runs])]
    addresses = torch.tensor([each.data_ptr() for each in tensors], device=DEVICE)
    move_rows(addresses, 42, *numbers)
    for found, plain in zip(tensors, expected, strict=True):
        assert torch.equal(found, plain)
