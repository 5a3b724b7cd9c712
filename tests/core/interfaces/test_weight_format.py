"""What formats and kernels share of canonical weights."""

from __future__ import annotations

import torch

from frame.core.interfaces.weight_format import pack_nibbles, unpack_nibbles


def test_packed_nibbles() -> None:
    quantized = torch.randint(0, 16, (3, 96), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(quantized)), quantized)
