"""What stands in place of numbers that are not finite spoils no sum over a neighbouring row, in any type."""

from __future__ import annotations

import pytest
import torch

from frame.attention_backends.shared import replace_non_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_that_fade_to_zero_do(dtype: torch.dtype, in_place: bool) -> None:
    """FlashAttention-3 adds up the values of a block whose keys are all hidden, and multiplies the sum by zero when it meets others."""
    values = torch.full((4096, 2, 16), torch.nan, dtype=dtype)
    values[7, 0, :3] = torch.tensor([torch.inf, -torch.inf, 0.5])
    out = replace_non_finite(values, in_place)
    assert out.dtype == dtype
    assert torch.equal(out.float().sum(0) * 0.0, torch.zeros(2, 16))
    assert out[7, 0, 2] == 0.5
    assert out.abs().max() >= 60_000  # nobody takes it for a result
