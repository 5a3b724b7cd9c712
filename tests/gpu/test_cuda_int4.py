"""The CUDA kernels of int4 weights against float64 and against the dequantized weight, also inside
a CUDA graph, and the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.kernels.linear import blocked_int4
from frame.kernels.linear.blocked_int4 import BlockedGemms, TilesPlan, pack_weight
from frame.quantization.gemm.cuda_int4 import CudaInt4Kernel
from frame.testing.weights.canonical_weights import make_weight
from tests.gpu.conformance_checks import checks_on, ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs compute capability 9.0", allow_module_level=True)

CHECKS = [(name, check) for name, check in checks_on("cuda", "gemm_kernel")[0] if name == "cuda_int4"]
GROUPED, PLAIN = WeightScheme("int4", (1, 64), zeros=True), WeightScheme("int4", (1, 128))
SIZES = [(5120, 5120), (34816, 512), (1296, 4096), (48, 17408)]


@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=ids(CHECKS))
def test_conformance(check: Any) -> None:
    check.run()


def on_gpu(weight: CanonicalWeight) -> CanonicalWeight:
    for name, tensor in weight.tensors.items():
        setattr(weight, name, tensor.cuda())
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", [GROUPED, PLAIN, WeightScheme("int4", (1, 0))], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products(scheme: WeightScheme, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernel = CudaInt4Kernel(build_context("cuda", dtype, 16))
    weight = on_gpu(make_weight(scheme, outputs, inputs, dtype=dtype))
    assert kernel.find_obstacle(weight) is None
    rounded = weight.dequantize(dtype)
    assert torch.equal(BlockedGemms(pack_weight(weight)).dequantize(), rounded)
    product, exact = kernel.prepare(weight), weight.dequantize(torch.float32).double()
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    for rows in (1, 3, 8, 9, 16, 17, 64, 100, 256, 300, 700, 2100):
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        dense = exact if rows <= 16 else rounded.double()  # for more rows weights are rounded, as the dequantized weight is
        want = x.double() @ dense.t()
        for got, expected in ((product(x), want), (product(x, bias), want + bias.double())):
            assert float((got.double() - expected).abs().max() / expected.abs().max()) < (0.004 if dtype == torch.bfloat16 else 0.0006)
        if rows <= 16:
            gate, up = (want + bias.double()).chunk(2, -1)
            gated = F.silu(gate) * up
            found = product.multiply_gated(x, bias)  # type: ignore[attr-defined]
            assert (found is None) == bool(outputs % 32)
            if found is not None:
                assert float((found.double() - gated).abs().max() / gated.abs().max()) < 0.006


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("cluster", "tiles"), [(0, 0), (1, 1), (2, 1), (3, 1), (8, 1), (3, 2), (5, 2), (4, 3), (2, 3), (7, 3)])
def test_divisions_give_the_same_sums_each_time(cluster: int, tiles: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    outputs, inputs = 1296, 1024
    weight = on_gpu(make_weight(GROUPED, outputs, inputs, dtype=dtype))
    gemms, dense = BlockedGemms(pack_weight(weight)), weight.dequantize(dtype).double()
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    for rows in (65, 100, 255, 257, 512):
        plan = TilesPlan(blocked_int4.choose_tile_rows(rows), cluster, tiles)
        monkeypatch.setattr(blocked_int4, "choose_tiles_plan", lambda *_, plan=plan: plan)
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        want = x.double() @ dense.t() + bias.double()
        got = gemms.multiply(x, bias)
        assert float((got.double() - want).abs().max() / want.abs().max()) < (0.004 if dtype == torch.bfloat16 else 0.0006)
        for _ in range(5):
            assert torch.equal(gemms.multiply(x, bias), got)


def test_graphs_replay_with_new_inputs_and_launches_follow_one_another() -> None:
    torch.manual_seed(0)
    kernel = CudaInt4Kernel(build_context("cuda", torch.bfloat16, 16))
    weights = [on_gpu(make_weight(GROUPED, 1024, 1024, dtype=torch.bfloat16, seed=seed)) for seed in range(4)]
    gemms = [kernel.prepare(weight) for weight in weights]
    for rows in (2, 12, 40, 200):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)

        def run(x: torch.Tensor = x) -> torch.Tensor:
            for _ in range(5):
                for product in gemms:
                    x = product(x) * 2
            return x

        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for _ in range(3):
            graph.replay()
            assert torch.equal(out, expected)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, run())
