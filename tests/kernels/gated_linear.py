"""The fused GEMM of gate and up against float64, with sizes that end inside tiles.

Collected by `tests/gpu/test_gated_linear.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from frame.kernels.launch import count_tma_processors
from frame.kernels.linear.gated_linear import can_use_tma, gated_linear, is_faster

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# gate and up are rounded before they are multiplied, perhaps in the other direction; the
# interpreter truncates bfloat16
UNIT = {torch.bfloat16: 2**-6 if DEVICE.type == "cuda" else 2**-5, torch.float16: 2**-9}


@pytest.mark.skipif(DEVICE.type == "cuda" and not count_tma_processors(DEVICE), reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "inputs", "gap"), [(3, 40, 24, 8), (130, 136, 72, 0), (300, 256, 128, 16)])
def test_gate_and_up(dtype: torch.dtype, rows: int, inner: int, inputs: int, gap: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, inputs + gap).to(DEVICE, dtype)[:, :inputs]
    weight = (torch.randn(2 * inner, inputs + gap) / inputs**0.5).to(DEVICE, dtype)[:, :inputs]
    assert can_use_tma(x, weight)
    gate, up = F.linear(x.double(), weight.double()).to(dtype).double().chunk(2, -1)
    got = gated_linear(x, weight, 5)
    assert got.is_contiguous()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=UNIT[dtype], atol=UNIT[dtype] / 8)


def test_tma_needs_16_byte_alignment() -> None:
    x, weight = torch.zeros(4, 68, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not can_use_tma(x[:, :64], weight)
    assert not can_use_tma(weight[:, 1:], weight)
    assert can_use_tma(weight[:, 8:], weight)
    assert not can_use_tma(weight.t(), weight)


def test_tiles_that_fill_the_last_wave() -> None:
    """Of the measured models with 0.6 and 8 billion parameters."""
    assert is_faster(2048, 3072, 132)
    assert not is_faster(1024, 3072, 132)
    assert not is_faster(512, 14336, 132)
    assert is_faster(1024, 14336, 132)
    assert count_tma_processors(torch.device("cpu")) == 0


@pytest.mark.parametrize(("inner", "faster"), [(3072, []), (14336, [128, 256]), (17408, [])])
def test_batches_whose_tiles_fill_their_waves(inner: int, faster: list[int]) -> None:
    """Of models with 0.6, 8 and 14 billion parameters."""
    assert [rows for rows in range(1, 1024) if is_faster(rows, inner, 132, (128, 256))] == faster
