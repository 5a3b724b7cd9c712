"""Packed products: padded row counts are few and close, and padding changes no row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from frame.models.layers.packed import can_pack, pack_weight, packed_linear, pad_row_count


def test_padded_row_counts_are_few_and_close() -> None:
    rows = range(1, 8193)
    padded = [pad_row_count(count) for count in rows]
    assert all(count <= wide <= count * 9 / 8 for count, wide in zip(rows, padded, strict=True))
    assert all(pad_row_count(wide) == wide for wide in padded)
    assert len(set(padded)) < 100
    assert pad_row_count(0) == 0


@pytest.mark.parametrize("count", [0, 1, 31, 33, 100, 257])
def test_a_padded_product_equals_the_plain_one(count: int) -> None:
    weight = torch.randn(48, 32).bfloat16()
    if not can_pack(weight):
        pytest.skip("this CPU packs nothing")
    x, bias = torch.randn(count, 32).bfloat16(), torch.randn(48).bfloat16()
    out = packed_linear(x, pack_weight(weight), bias)
    assert out.shape == (count, 48)
    torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=0.02, atol=0.05)
