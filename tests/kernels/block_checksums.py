"""Checksums of blocks. Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frame.kernels import INTERPRETED
from frame.kernels.block_checksums import sum_blocks

DEVICE = "cpu" if INTERPRETED else "cuda"
FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def expect(block: torch.Tensor) -> int:
    with np.errstate(over="ignore"):
        words = block.cpu().numpy().view(np.int64)
        value = words ^ (np.arange(1, len(words) + 1) * np.int64(FIRST))
        value = (value ^ (value >> 31)) * np.int64(SECOND)
        return int((value ^ (value >> 29)).sum())


@pytest.mark.parametrize("num_words", [1, 2048, 40_007])
def test_the_sum_of_all_words_with_their_places(num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    blocks = torch.randint(256, (3, 8 * num_words), dtype=torch.uint8, generator=generator).to(DEVICE)
    addresses = torch.tensor([block.data_ptr() for block in blocks], device=DEVICE)
    assert sum_blocks(addresses, num_words, FIRST, SECOND).tolist() == [expect(block) for block in blocks]
