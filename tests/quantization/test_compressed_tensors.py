"""Fields of compressed-tensors configurations that test_formats.py does not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frame.quantization.compressed_tensors import read_scheme


@pytest.mark.parametrize(
    ("order", "is_stored"),
    [
        (None, False),
        (False, False),
        ("weight", False),
        ("static", False),
        (True, True),
        ("group", True),
        ("dynamic", True),
        ("GROUP", True),
    ],
)
def test_groups_of_inputs_in_any_order(order: Any, is_stored: bool) -> None:
    """`dynamic` is the library's other name of `group`, as `static` is of `weight`."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": order}
    layer = read_scheme("group_0", {"weights": weights}, {"format": "pack-quantized"}, torch.float32)
    assert ("weight_g_idx" in layer.list_tensors(64, [64])) is is_stored
