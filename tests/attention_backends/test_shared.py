"""Replacements of non-finite values do not corrupt sums over neighbouring rows, in any dtype."""

from __future__ import annotations

import pytest
import torch

from frame.attention_backends.shared import replace_non_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_replaced_values_scale_to_zero(dtype: torch.dtype, in_place: bool) -> None:
    """FlashAttention-3 sums the values of a fully masked block, and multiplies the sum by zero when
    it reaches visible keys."""
    values = torch.full((4096, 2, 16), torch.nan, dtype=dtype)
    values[7, 0, :3] = torch.tensor([torch.inf, -torch.inf, 0.5])
    out = replace_non_finite(values, in_place)
    assert out.dtype == dtype
    assert torch.equal(out.float().sum(0) * 0.0, torch.zeros(2, 16))
    assert out[7, 0, 2] == 0.5
    assert out.abs().max() >= 60_000  # too large to pass as a result
