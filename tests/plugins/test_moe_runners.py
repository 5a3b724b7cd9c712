"""Every variant of the expert GEMMs equals the definition, for all shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.moe import DispatchOutput, MoERequirements
from frame.models.layers.packed import can_pack, pack_weight
from frame.models.layers.weights.expert_weights import pack_small_experts
from frame.plugins.loader import load_registry
from frame.plugins.moe_runners.torch_native import TorchNative, prefers_dense, run_dense, run_each, run_grouped


def definition(tokens: DispatchOutput, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    out = torch.zeros(tokens.x.shape, dtype=torch.float64)
    for row, x in enumerate(tokens.x.double()):
        for expert, weight in zip(tokens.ids[row].tolist(), tokens.weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x).chunk(2)
            out[row] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


def routed(count: int, experts: int, top: int, hidden: int, dtype: torch.dtype) -> DispatchOutput:
    weights, ids = torch.rand(count, experts).topk(top)
    return DispatchOutput(torch.randn(count, hidden, dtype=dtype), ids, weights)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 40),
    experts=st.integers(1, 9),
    top=st.integers(1, 3),
    sizes=st.sampled_from([(16, 8), (32, 24), (8, 16)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_all_ways_follow_the_definition(count: int, experts: int, top: int, sizes: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, inner = sizes
    tokens = routed(count, experts, min(top, experts), hidden, dtype)
    gate_up = torch.randn(experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
    down = torch.randn(experts, hidden, inner, dtype=dtype) * inner**-0.5
    want = definition(tokens, gate_up, down)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    results = [run_grouped(tokens, gate_up, down), run_each(tokens, gate_up, down)]
    if can_pack(gate_up[0]):
        results.append(run_dense(tokens, pack_weight(gate_up.flatten(0, 1)), pack_weight(down.transpose(0, 1).flatten(1)), experts))
        results.append(run_each(tokens, [pack_weight(part) for part in gate_up], [pack_weight(part) for part in down]))
    for out in results:
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), want, **tolerance)


class Plain(nn.Module):
    def __init__(self, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner, dtype=dtype) * inner**-0.5, requires_grad=False)


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 16, 16), (3, 7, 8)])
@pytest.mark.parametrize("count", [1, 20, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_runner_takes_any_shape(shape: tuple[int, int, int], count: int, dtype: torch.dtype) -> None:
    """Also those that the grouped multiplication refuses."""
    torch.manual_seed(0)
    experts = Plain(*shape, dtype)
    runner = TorchNative(BuildContext(device=torch.device("cpu"), dtype=dtype, tp=LocalGroup(), limits=Limits(8, 512, 512, 4)))
    tokens = routed(count, shape[0], 2, shape[1], dtype)
    error = (runner.run(tokens, experts).double() - definition(tokens, experts.gate_up, experts.down)).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.1)


def test_a_token_without_weight_contributes_nothing() -> None:
    """A dispatcher gives weight 0 for experts that live elsewhere."""
    experts = Plain(4, 8, 8, torch.float32)
    tokens = routed(6, 4, 2, 8, torch.float32)
    none = DispatchOutput(tokens.x, tokens.ids, torch.zeros_like(tokens.weights))
    for run in (run_grouped, run_each):
        assert not run(none, experts.gate_up, experts.down).any()


def test_dense_is_for_small_experts_and_batches() -> None:
    def made(experts: int, hidden: int, inner: int, dtype: torch.dtype) -> Plain:
        layer = Plain(experts, hidden, inner, dtype)
        pack_small_experts(layer, layer.gate_up, layer.down)
        return layer

    small = made(8, 256, 128, torch.bfloat16)
    if can_pack(small.down[0]):
        assert small.packed_down is not None
    assert not hasattr(made(8, 256, 128, torch.float32), "packed_down")
    assert not hasattr(made(2, 1024, 256, torch.bfloat16), "packed_down")
    assert prefers_dense(routed(32, 8, 2, 4, torch.float32), 8)
    assert not prefers_dense(routed(1, 64, 2, 4, torch.float32), 64)
    assert not prefers_dense(routed(500, 8, 2, 4, torch.float32), 8)


def test_manifest_says_what_fits() -> None:
    registry = load_registry(installed=False)
    runner, dispatcher = registry.get("moe_runner", "torch_native"), registry.get("moe_dispatcher", "all_reduce")
    requirements = MoERequirements("cpu", None, "bfloat16")
    assert runner.capabilities.unsupported(requirements) == []
    assert dispatcher.capabilities.unsupported(requirements) == []
    assert "does not compute in int8" in str(runner.capabilities.unsupported(MoERequirements("cpu", None, "int8"))[0])


def test_kernels_run_on_a_cpu_only_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    record = load_registry(installed=False).get("moe_runner", "triton")
    requirements = MoERequirements("cpu", None, "bfloat16")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert [reason.sentence for reason in record.capabilities.unsupported(requirements)] == ["runs on cuda, not on cpu"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert record.capabilities.unsupported(requirements) == []


def test_a_gpu_takes_the_kernels_and_captures_them() -> None:
    registry = load_registry(installed=False)
    requirements = MoERequirements("cuda", (9, 0), "bfloat16")
    fitting = [record for record in registry.records("moe_runner") if not record.capabilities.unsupported(requirements)]
    assert {record.name for record in fitting} >= {"torch_native", "torch_grouped", "triton"}
    assert [record.name for record in fitting if not record.capabilities.graphs] == ["torch_native"]
    assert max(fitting, key=lambda record: record.rank).name == "triton"
