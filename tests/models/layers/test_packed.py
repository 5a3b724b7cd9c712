"""Packed products: padded numbers of rows are few, near, and change no row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from frame.models.layers.packed import can_pack, pack_weight, packed_linear, padded_rows


def test_padded_numbers_of_rows_are_few_and_near() -> None:
    rows = range(1, 8193)
    padded = [padded_rows(count) for count in rows]
    assert all(count <= wide <= count * 9 / 8 for count, wide in zip(rows, padded, strict=True))
    assert all(padded_rows(wide) == wide for wide in padded)
    assert len(set(padded)) < 100
    assert padded_rows(0) == 0


@pytest.mark.parametrize("count", [0, 1, 31, 33, 100, 257])
def test_a_padded_product_is_the_product(count: int) -> None:
    weight = torch.randn(48, 32).bfloat16()
    if not can_pack(weight):
        pytest.skip("this CPU packs nothing")
    x, bias = torch.randn(count, 32).bfloat16(), torch.randn(48).bfloat16()
    out = packed_linear(x, pack_weight(weight), bias)
    assert out.shape == (count, 48)
    torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=0.02, atol=0.05)
