"""The products of few rows from boxes of weights against float64, over plans, types, shapes,
strides and biases."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame import kernels
    from frame.kernels.linear.fp8_quantize import quantize_rows
    from frame.kernels.linear.linear_plan import Plan
    from frame.kernels.linear.linear_stream import stream_linear
    from frame.models.layers.plain_matmul import PlainMatmul
    from frame.quantization.fp8_weights import quantize_outputs
    from tests.kernels.linear import UNIT, random, reference

    pytestmark.append(pytest.mark.skipif(not kernels.supports_tma_streaming(torch.device("cuda")), reason="needs compute capability 9.0"))

# warps, items under way, outputs of a slice, 32s of inputs of an item
SIZES = {
    "one box": (4, 4, 64, 4),
    "two boxes": (4, 4, 40, 4),
    "three boxes": (4, 3, 56, 2),
    "small": (4, 4, 8, 8),
    "tall": (8, 4, 136, 2),
}
CASES = ((1, 1024, 0, False), (3, 1000, 8, True), (8, 4096, 0, False), (17, 520, 16, True), (64, 2048, 0, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_streams(size: str, gated: bool, dtype: torch.dtype) -> None:
    plan = Plan("stream", *SIZES[size])
    for rows, inputs, gap, biased in CASES:
        slices = 300 if rows == 3 else 8  # in rounds; all at once
        outputs = plan.outputs * slices * (2 if gated else 1)
        x = random(rows, inputs, dtype=dtype, gap=gap)
        weight = random(outputs, inputs, dtype=dtype, gap=2 * gap) / inputs**0.5
        bias = random(outputs, dtype=dtype) if biased else None
        got = [stream_linear(x, weight, bias, plan, gated=gated) for _ in range(5)]
        unit = UNIT[dtype] * (4 if gated else 1)
        torch.testing.assert_close(got[0].double(), reference(x, weight, bias, gated), rtol=1.01 * unit, atol=unit / 4)
        assert all(torch.equal(each, got[0]) for each in got)


def test_rows_stand_alone() -> None:
    """What other rows hold, NaN included, changes nothing."""
    plan = Plan("stream", 4, 3, 64, 2)
    x, weight = random(5, 512, dtype=torch.bfloat16), random(128, 512, dtype=torch.bfloat16)
    want = stream_linear(x, weight, None, plan)[1]
    x[0], x[2:] = float("nan"), float("inf")
    assert torch.equal(stream_linear(x, weight, None, plan)[1], want)


def test_a_product_of_rows_that_begin_anywhere() -> None:
    weight = random(4096, 4096, dtype=torch.bfloat16) / 64
    gemm = PlainMatmul(weight)
    whole = random(8 * 4097 + 1, dtype=torch.bfloat16)
    for x in (whole[1 : 1 + 8 * 4096].view(8, 4096), whole[: 8 * 4097].view(8, 4097)[:, :4096]):
        want = reference(x, weight, None, gated=False)
        torch.testing.assert_close(gemm(x, weight).double(), want, rtol=1.01 * UNIT[torch.bfloat16], atol=UNIT[torch.bfloat16])


def test_replays_are_the_same() -> None:
    plan = Plan("stream", 4, 4, 32, 4)
    x = random(8, 4096, dtype=torch.bfloat16)
    weights = [random(4096, 4096, dtype=torch.bfloat16) / 64 for _ in range(3)]
    want = [stream_linear(x, weight, None, plan) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [stream_linear(x, weight, None, plan) for weight in weights]
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("gated", [False, True])
def test_float8(gated: bool) -> None:
    """Quantized rows times quantized weights, against the products of their values."""
    for rows, inputs, plan, biased in ((1, 5120, Plan("stream", 4, 6, 40, 8), False), (11, 2000, Plan("stream", 8, 4, 136, 4), True)):
        outputs = plan.outputs * 128 * (2 if gated else 1)
        x = random(rows, inputs, dtype=torch.bfloat16)
        weight, by_output = quantize_outputs(random(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5)
        bias = random(outputs, dtype=torch.bfloat16) if biased else None
        rounded, by_row = quantize_rows(x)
        scales = by_row, by_output
        got = [stream_linear(rounded, weight, bias, plan, gated, scales, x.dtype) for _ in range(5)]
        want = reference(rounded.double() * by_row, weight.double() * by_output[:, None], bias, gated)
        # the tensor cores keep 13 bits or more of each product of float8 inputs
        torch.testing.assert_close(got[0].double(), want, rtol=4 * UNIT[x.dtype], atol=4 * UNIT[x.dtype])
        assert all(torch.equal(each, got[0]) for each in got)
