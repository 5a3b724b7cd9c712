"""The products of humming-kernels against float64, also inside a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.quantization import HummingOptions
from frame.quantization.gemm.humming import HummingKernel
from frame.testing.moe.experts import reference
from frame.testing.weights.canonical_weights import make_weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("humming", reason="needs humming-kernels")

SCHEMES = [WeightScheme("int4", (1, 128)), WeightScheme("int4", (1, 64), zeros=True), WeightScheme("e2m1", (1, 32))]
OUTPUTS, INPUTS = 512, 1024


def on_gpu(weight: CanonicalWeight) -> CanonicalWeight:
    for name, tensor in weight.tensors.items():
        setattr(weight, name, tensor.cuda())
    return weight


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(got: torch.Tensor, want: torch.Tensor, products: int = 1) -> None:
    """Each of `products` in a row rounds its inputs, weights and sums to bfloat16."""
    assert float((got.double() - want).abs().max() / want.abs().max()) < 0.01 * products


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products(scheme: WeightScheme) -> None:
    kernel = HummingKernel(build_context("cuda", torch.bfloat16, 16))
    weight = on_gpu(make_weight(scheme, OUTPUTS, INPUTS, dtype=torch.bfloat16))
    assert kernel.find_obstacle(weight) is None
    product, dense = kernel.prepare(weight), weight.dequantize(torch.float32).double()
    both = HummingKernel(kernel.context, HummingOptions(few_rows=True)).prepare(weight)
    bias = torch.randn(OUTPUTS, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 17, 300):
        x = torch.randn(rows, INPUTS, device="cuda", dtype=torch.bfloat16)
        for each in (product, both):
            check(each(x, bias), x.double() @ dense.t() + bias.double())
    x = torch.randn(4, INPUTS, device="cuda", dtype=torch.bfloat16)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    check(out, x.double() @ dense.t())


def test_outputs_that_no_tile_divides() -> None:
    """320 outputs are 2.5 tiles of the library."""
    kernel = HummingKernel(build_context("cuda", torch.bfloat16, 16))
    weight = on_gpu(make_weight(SCHEMES[1], 320, 512, dtype=torch.bfloat16))
    product, dense = kernel.prepare(weight), weight.dequantize(torch.float32).double()
    for rows in (1, 100):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        check(product(x), x.double() @ dense.t())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_of_experts(scheme: WeightScheme) -> None:
    kernel = HummingKernel(build_context("cuda", torch.bfloat16, 16))
    weight = on_gpu(make_weight(scheme, OUTPUTS, INPUTS, experts=4, dtype=torch.bfloat16))
    product, dense = kernel.prepare_experts(weight), weight.dequantize(torch.float32).double()
    ends = [3, 3, 40, 90]
    x = torch.randn(100, INPUTS, device="cuda", dtype=torch.bfloat16)
    got = product(x, torch.tensor(ends, dtype=torch.int32, device="cuda"))[:90]
    parts = zip([0, *ends[:-1]], ends, dense, strict=True)
    check(got, torch.cat([x[first:last].double() @ expert.t() for first, last, expert in parts]))


@pytest.mark.parametrize(("scheme", "sizes"), [(SCHEMES[1], (1024, 256)), (SCHEMES[2], (1024, 256)), (SCHEMES[2], (2880, 96))], ids=str)
def test_mixtures(scheme: WeightScheme, sizes: tuple[int, int]) -> None:
    """Sizes: hidden and inner, which the library's tiles need not divide."""
    kernel = HummingKernel(build_context("cuda", torch.bfloat16, 16))
    hidden, inner = sizes
    shapes = (2 * inner, hidden), (hidden, inner)
    weights = [on_gpu(make_weight(scheme, *shape, experts=8, dtype=torch.bfloat16)) for shape in shapes]
    assert all(kernel.find_obstacle(weight) is None for weight in weights)
    gate_up, down = (weight.dequantize(torch.float32) for weight in weights)
    first, second = (kernel.prepare_experts(weight) for weight in weights)
    mix: Any = first.mix  # type: ignore[attr-defined]
    for count in (1, 40, 700):
        x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
        ids, shares = torch.rand(count, 8, device="cuda").topk(2).indices, torch.rand(count, 2, device="cuda")
        check(mix(second, DispatchOutput(x, ids, shares), nn.Module(), False), reference(x, ids, shares, gate_up, down), 2)
