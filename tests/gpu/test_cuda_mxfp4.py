"""The CUDA kernels of experts in MXFP4 against float64, run to run and inside a CUDA graph, and the
conformance suite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.models.layers.weights.expert_activation import ClampedSwiGLU, activate
from frame.quantization.gemm.cuda_mxfp4 import CudaMxfp4Kernel
from frame.testing.weights.canonical_weights import make_weight
from tests.gpu.conformance_checks import checks_on, ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs compute capability 9.0", allow_module_level=True)

CHECKS = [(name, check) for name, check in checks_on("cuda", "gemm_kernel")[0] if name == "cuda_mxfp4"]
SIZES = [
    (8, 2, 128, 64, False),
    (32, 4, 2880, 2880, True),
    (7, 3, 192, 72, True),
    (16, 2, 2880, 1440, True),
]  # experts, k, hidden, inner, biases
TOLERANCE = 0.012  # relative to the largest value; results between the products are rounded


@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=ids(CHECKS))
def test_conformance(check: Any) -> None:
    check.run()


class Experts:
    """One layer's experts, quantized and in float64."""

    def __init__(self, experts: int, top: int, hidden: int, inner: int, biased: bool) -> None:
        torch.manual_seed(0)
        self.count, self.top, self.hidden = experts, top, hidden
        self.layer: Any = nn.Module()
        self.layer.activation = ClampedSwiGLU(1.702, 7.0) if biased else None
        if biased:
            self.layer.gate_up_bias = torch.randn(experts, 2 * inner, device="cuda", dtype=torch.bfloat16)
            self.layer.down_bias = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16)
        kernel = CudaMxfp4Kernel(build_context("cuda", torch.bfloat16, 16))
        weights = {"gate_up": self.make(2 * inner, hidden, 0), "down": self.make(hidden, inner, 1)}
        assert all(kernel.find_obstacle(weight) is None for weight in weights.values())
        self.gemms: dict[str, Any] = {name: kernel.prepare_experts(weight) for name, weight in weights.items()}
        self.dense = {name: weight.dequantize(torch.float32).double() for name, weight in weights.items()}

    def make(self, outputs: int, inputs: int, seed: int) -> CanonicalWeight:
        weight = make_weight(WeightScheme("e2m1", (1, 32)), outputs, inputs, experts=self.count, dtype=torch.bfloat16, seed=seed)
        for name, tensor in weight.tensors.items():
            setattr(weight, name, tensor.cuda())
        return weight

    def draw(self, tokens: int) -> DispatchOutput:
        chosen = torch.rand(tokens, self.count, device="cuda").topk(self.top).indices
        x = torch.randn(tokens, self.hidden, device="cuda", dtype=torch.bfloat16)
        return DispatchOutput(x, chosen, torch.rand(tokens, self.top, device="cuda"))

    def run(self, tokens: DispatchOutput) -> torch.Tensor:
        result: torch.Tensor = self.gemms["gate_up"].mix(self.gemms["down"], tokens, self.layer, False)
        return result

    def compute(self, tokens: DispatchOutput) -> torch.Tensor:
        """The reference, in float64."""
        total = torch.zeros(tokens.x.shape, dtype=torch.float64, device="cuda")
        for expert in range(self.count):
            token, place = (tokens.ids == expert).nonzero(as_tuple=True)
            owners = torch.full((len(token),), expert, device="cuda")
            active = activate(self.layer, tokens.x[token].double() @ self.dense["gate_up"][expert].t(), owners)
            rows = active @ self.dense["down"][expert].t()
            rows = rows + (self.layer.down_bias[expert].double() if hasattr(self.layer, "down_bias") else 0)
            total.index_add_(0, token, rows * tokens.weights[token, place].double()[:, None])
        return total


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_of_any_number_of_tokens(sizes: tuple[Any, ...]) -> None:
    experts = Experts(*sizes)
    for count in (1, 2, 3, 8, 17, 40, 64, 100, 256, 600, 1500, 4000):
        tokens = experts.draw(count)
        want = experts.compute(tokens)
        found = experts.run(tokens)
        assert float((found.double() - want).abs().max() / want.abs().max()) < TOLERANCE, count
        assert torch.equal(experts.run(tokens), found), f"{count} tokens have other bits the second time"
    assert experts.run(experts.draw(0)).shape == (0, sizes[2])


def test_all_tokens_of_one_expert() -> None:
    experts = Experts(*SIZES[1])
    for count in (8, 300, 3000):
        tokens = experts.draw(count)
        tokens = DispatchOutput(tokens.x, torch.arange(4, device="cuda").expand(count, 4).contiguous(), tokens.weights)
        want = experts.compute(tokens)
        assert float((experts.run(tokens).double() - want).abs().max() / want.abs().max()) < TOLERANCE


def test_a_graph_gives_what_the_same_launches_gave() -> None:
    experts = Experts(*SIZES[1])
    for count in (1, 8, 64, 256):
        tokens, others = experts.draw(count), experts.draw(count)
        want = experts.run(others)
        experts.run(tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = experts.run(tokens)
        for mine, theirs in ((tokens.x, others.x), (tokens.ids, others.ids), (tokens.weights, others.weights)):
            mine.copy_(theirs)
        for _ in range(3):
            graph.replay()
            assert torch.equal(found, want), count


def test_rows_of_nan_leave_others_alone() -> None:
    experts = Experts(*SIZES[2])
    tokens = experts.draw(40)
    tokens.x[1::2] = torch.nan
    found = experts.run(tokens)[::2]
    want = experts.compute(DispatchOutput(tokens.x[::2], tokens.ids[::2], tokens.weights[::2]))
    assert float((found.double() - want).abs().max() / want.abs().max()) < TOLERANCE
