"""SiLU(gate) * up of many rows, fetched by a warp of its own, against float32: sizes of models,
tiles that rows end in, strides, types."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame import kernels
    from frame.kernels.linear.gated_prefill import can_tile, gated_prefill
    from frame.models.layers.plain_matmul import PlainMatmul

    pytestmark.append(pytest.mark.skipif(not kernels.supports_tma_streaming(torch.device("cuda")), reason="needs compute capability 9.0"))

DEVICE = torch.device("cuda")
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half of the last place
SIZES = {"0.6B": (1024, 3072), "8B": (4096, 14336), "14B": (5120, 17408)}


def random(rows: int, inputs: int, dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs + gap, device=DEVICE).to(dtype)[:, :inputs]


def check(x: torch.Tensor, weight: torch.Tensor, programs: int = 132) -> None:
    gate, up = F.linear(x.float(), weight.float()).chunk(2, -1)
    want = F.silu(gate) * up
    got = gated_prefill(x, weight, programs)
    assert got.is_contiguous()
    assert got.dtype == x.dtype
    # beside the one rounding, the sums' order and the fast exponential
    torch.testing.assert_close(got.float(), want, rtol=1.5 * UNIT[x.dtype], atol=5e-4 * float(want.abs().max()))
    assert torch.equal(gated_prefill(x, weight, programs), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "inner", "inputs", "gap"), [(1, 128, 64, 8), (130, 256, 128, 0), (300, 384, 192, 16), (1025, 640, 1024, 8)]
)
@pytest.mark.parametrize("programs", [5, 132])
def test_gate_and_up(dtype: torch.dtype, rows: int, inner: int, inputs: int, gap: int, programs: int) -> None:
    torch.manual_seed(0)
    check(random(rows, inputs, dtype, gap), random(2 * inner, inputs, dtype, 2 * gap) / inputs**0.5, programs)


@pytest.mark.parametrize("scale", [0.02, 1.0])
@pytest.mark.parametrize("rows", [128, 256, 1025, 4097, 8190])
@pytest.mark.parametrize("model", SIZES)
def test_sizes_of_models(model: str, rows: int, scale: float) -> None:
    torch.manual_seed(0)
    inputs, inner = SIZES[model]
    check(random(rows, inputs, torch.bfloat16), random(2 * inner, inputs, torch.bfloat16) * scale)


def test_what_tiles_cover() -> None:
    assert all(can_tile(inner, inputs) for inputs, inner in SIZES.values())
    assert not can_tile(14336 + 64, 4096)
    assert not can_tile(14336, 4096 + 32)


@pytest.mark.parametrize("inner", [14336, 14336 + 64])
def test_a_product_takes_it_where_it_can(inner: int) -> None:
    torch.manual_seed(0)
    x, weight = random(1024, 1024, torch.bfloat16), random(2 * inner, 1024, torch.bfloat16) / 32
    got = PlainMatmul(weight).multiply_gated(x, weight)
    assert got is not None
    gate, up = F.linear(x.float(), weight.float()).chunk(2, -1)
    torch.testing.assert_close(got.float(), F.silu(gate) * up, rtol=2**-6, atol=2**-6)
    if inner % 128 == 0:
        assert torch.equal(got, gated_prefill(x, weight, 132))


def test_a_product_takes_it_for_batches() -> None:
    torch.manual_seed(0)
    weight = random(2 * 14336, 4096, torch.bfloat16) / 64
    gemm = PlainMatmul(weight)
    for rows in (128, 256, 192):
        x = random(rows, 4096, torch.bfloat16)
        got = gemm.multiply_gated(x, weight)
        assert (got is None) == (rows == 192)
        assert got is None or torch.equal(got, gated_prefill(x, weight, 132))


def test_replays_are_the_same() -> None:
    torch.manual_seed(0)
    x = random(2048, 1024, torch.bfloat16)
    weights = [random(6144, 1024, torch.bfloat16) / 32 for _ in range(3)]
    want = [gated_prefill(x, weight, 132) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [gated_prefill(x, weight, 132) for weight in weights]
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
