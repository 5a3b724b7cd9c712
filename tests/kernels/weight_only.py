"""Products with 4-bit and 8-bit weights against float64, over quantized values, groups, rows and
experts.

Collected by `tests/gpu/test_weight_only.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.kernels.linear.weight_only import MAX_FUSED_ROWS, Plan, choose_plan, dequantize, find_obstacle, multiply
from frame.kernels.linear.weight_rows import MAX_PAIRS, RowsPlan, count_max_rows, multiply_rows
from frame.kernels.moe.quantized_experts import PLAN_ROWS
from frame.models.layers.weights.expert_activation import ClampedSwiGLU, activate, squared_relu
from frame.quantization.gemm.weight_only import WeightOnlyGemm, WeightOnlyGroupedGemm
from frame.testing.weights.canonical_weights import make_weight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = DEVICE.type == "cuda"
DTYPES = (torch.bfloat16, torch.float16) if LARGE else (torch.float32,)
CLOSE = 0.01 if LARGE else 1e-5  # relative to the largest value
CASES = [
    (WeightScheme("int4", (1, 128)), False),
    (WeightScheme("int4", (1, 64), zeros=True), False),
    (WeightScheme("int4", (1, 32), zeros=True), False),
    (WeightScheme("int4", (1, 0)), False),
    (WeightScheme("int8", (1, 0)), False),
    (WeightScheme("int8", (1, 64), zeros=True), False),
    (WeightScheme("e2m1", (1, 32)), False),
    (WeightScheme("e2m1", (1, 16)), True),
    (WeightScheme("e4m3", (1, 0)), False),
    (WeightScheme("e4m3", (128, 128)), False),
]
SIZES = [(64, 256), (40, 192), *([(4096, 4096), (1024, 14336)] if LARGE else [])]


def weight_of(scheme: WeightScheme, outer: bool, outputs: int, inputs: int, dtype: torch.dtype, experts: int = 0) -> CanonicalWeight:
    weight = make_weight(scheme, outputs, inputs, experts=experts, outer=outer, dtype=dtype)
    for name, tensor in weight.tensors.items():
        setattr(weight, name, tensor.to(DEVICE))
    return weight


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error <= CLOSE, f"largest error {error:.2e} of the largest number"


@pytest.mark.parametrize(("scheme", "outer"), CASES, ids=[str(scheme) for scheme, _ in CASES])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products(scheme: WeightScheme, outer: bool, outputs: int, inputs: int) -> None:
    for dtype in DTYPES:
        weight = weight_of(scheme, outer, outputs, inputs, dtype)
        assert find_obstacle(weight) is None
        dense = weight.dequantize(torch.float32).double()
        assert torch.equal(dequantize(weight, torch.float32), dense.float())
        counter = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
        for rows in (1, 20, 130) if LARGE or outputs == 64 else (3,):
            x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
            want = x.double() @ dense.t()
            plans = [choose_plan(rows, weight, 132), *([Plan(32, 64, 64, 3, split=2), Plan(16, 64, 32, 2)] if LARGE else [])]
            for plan in plans:
                if scheme.group[1] and scheme.group[1] % plan.inputs and scheme.group[1] % 32 and scheme.group[1] != 16:
                    continue
                check(multiply(x, weight, None, plan, counter), want)
                check(multiply(x, weight, bias, plan, counter), want + bias.double())
                assert not counter.any()


@pytest.mark.parametrize(("scheme", "outer"), CASES[:3] + CASES[6:8], ids=[str(scheme) for scheme, _ in CASES[:3] + CASES[6:8]])
def test_experts(scheme: WeightScheme, outer: bool) -> None:
    dtype = DTYPES[0]
    weight = weight_of(scheme, outer, 64, 256, dtype, experts=3)
    product = WeightOnlyGroupedGemm(weight)
    for sizes in ((1, 0, 2), (0, 40, 3), (5, 5, 0)):
        x = torch.randn(sum(sizes) + 1, 256, device=DEVICE, dtype=dtype)
        ends = torch.tensor(sizes).cumsum(0).to(DEVICE, torch.int32)
        parts = x[: sum(sizes)].split(sizes)
        want = torch.cat([part.double() @ weight.expert(index).dequantize(torch.float32).double().t() for index, part in enumerate(parts)])
        check(product(x, ends)[: sum(sizes)], want)


MIXTURES = [(1, None), (4, squared_relu), (6, ClampedSwiGLU(1.702, 0.5)), (7, None)]


@pytest.mark.parametrize(("case", "activation"), MIXTURES)
def test_mixtures(case: int, activation: Any) -> None:
    """Whole experts, as MoE layers call them, with biases where a model has them."""
    (scheme, outer), biased = CASES[case], activation is not None
    experts, hidden, inner, top = 3, 64, 96, 2
    layer: Any = nn.Module()
    layer.activation, layer.gated = activation, activation is not squared_relu
    wide = 2 * inner if layer.gated else inner
    for dtype in DTYPES:
        if biased:
            layer.gate_up_bias = torch.randn(experts, wide, device=DEVICE, dtype=dtype)
            layer.down_bias = torch.randn(experts, hidden, device=DEVICE, dtype=dtype)
        group = (1, 32) if scheme.group[1] == 64 else scheme.group
        weights = [weight_of(replace(scheme, group=group), outer, *sizes, dtype, experts) for sizes in ((wide, hidden), (hidden, inner))]
        first, second = (weight.dequantize(torch.float32) for weight in weights)
        gate_up, down = (WeightOnlyGroupedGemm(weight) for weight in weights)
        for count in (1, *(rows * experts // top + 1 for rows in (MAX_PAIRS // experts, *PLAN_ROWS))) if LARGE else (1 + case % 2,):
            x = torch.randn(count, hidden, device=DEVICE, dtype=dtype)
            ids = torch.rand(count, experts, device=DEVICE).topk(top).indices
            tokens = DispatchOutput(x, ids, torch.rand(count, top, device=DEVICE))
            flat = ids.flatten()
            gates = torch.einsum("pi,poi->po", x.repeat_interleave(top, 0).float(), first[flat])
            rows = torch.einsum("pi,poi->po", activate(layer, gates, flat).double(), second[flat].double())
            rows = rows + layer.down_bias[flat] if biased else rows
            want = (rows.view(count, top, -1) * tokens.weights.double().unsqueeze(-1)).sum(1)
            got, parts = (gate_up.mix(down, tokens, layer, parts=parts) for parts in (False, True))
            assert got is not None and parts is not None
            assert parts.shape == (count, top, hidden)
            for each in (got, parts.sum(1)):
                assert float((each.double() - want).abs().max() / want.abs().max()) <= 3 * CLOSE


MINIMA = WeightScheme("int4", (1, 32), minima=True)
FEW = [CASES[0][0], CASES[1][0], WeightScheme("int4", (1, 96)), CASES[6][0], MINIMA]


@pytest.mark.parametrize("scheme", FEW, ids=str)
def test_products_of_few_rows(scheme: WeightScheme) -> None:
    dtype = torch.bfloat16 if LARGE else torch.float32
    sizes = [(40, 288, RowsPlan(1, 2, 2)), *[(5120, 4096, RowsPlan(8, 2, 1)), (64, 640, RowsPlan())] * LARGE]
    for outputs, inputs, plan in sizes:
        weight = weight_of(scheme, False, outputs, inputs, dtype)
        dense, maximum = weight.dequantize(torch.float32).double(), count_max_rows(weight, dtype)
        bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
        for rows in (1, maximum, 2 * maximum, 16) if LARGE else (maximum + 1,):
            x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
            want = x.double() @ dense.t() + bias.double()
            check(multiply_rows(x, weight, bias, plan), want)
            gated = WeightOnlyGemm(weight).multiply_gated(x[:maximum], bias)
            assert gated is not None
            gate, up = want[:maximum].chunk(2, -1)
            check(gated, nn.functional.silu(gate) * up)


def test_an_order_of_inputs() -> None:
    dtype = DTYPES[0]
    scheme = WeightScheme("int4", (1, 64), zeros=True, ordered=True)
    weight = weight_of(scheme, False, 64, 192, dtype)
    x = torch.randn(2, 3, 192, device=DEVICE, dtype=dtype)
    check(WeightOnlyGemm(weight)(x), x.double() @ weight.dequantize(torch.float32).double().t())
    experts = weight_of(scheme, False, 64, 192, dtype, experts=2)
    ends = torch.tensor([4, 6], device=DEVICE, dtype=torch.int32)
    parts = x.flatten(0, 1).double().split((4, 2))
    want = [part @ experts.expert(index).dequantize(torch.float32).double().t() for index, part in enumerate(parts)]
    check(WeightOnlyGroupedGemm(experts)(x.flatten(0, 1), ends), torch.cat(want))


def test_many_rows_multiply_the_dequantized_weight() -> None:
    weight = weight_of(WeightScheme("int4", (1, 64), zeros=True), False, 64, 128, DTYPES[0])
    x = torch.randn(MAX_FUSED_ROWS + 1, 128, device=DEVICE, dtype=DTYPES[0])
    check(WeightOnlyGemm(weight)(x), x.double() @ weight.dequantize(torch.float32).double().t())


def test_more_rows_of_a_weight_with_minima() -> None:
    weight = weight_of(MINIMA, False, 64, 96, DTYPES[0])
    x = torch.randn(20, 96, device=DEVICE, dtype=DTYPES[0])
    check(WeightOnlyGemm(weight)(x), x.double() @ weight.dequantize(torch.float32).double().t())
    assert "of one matrix" in str(find_obstacle(weight_of(MINIMA, False, 64, 96, DTYPES[0], experts=2)))


def test_groups_that_no_tile_fits_are_refused() -> None:
    assert "multiples of 32" in str(find_obstacle(weight_of(WeightScheme("int4", (1, 24)), False, 64, 192, DTYPES[0])))
    assert "multiples of 32" in str(find_obstacle(weight_of(WeightScheme("int8", (1, 16)), False, 64, 192, DTYPES[0])))
