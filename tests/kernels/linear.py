"""Skinny GEMM kernels against float64, over plans, dtypes, shapes, strides and biases.

Collected by `tests/gpu/test_linear.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.weight_format import FormatContext
from frame.kernels.linear.linear import skinny_linear
from frame.kernels.linear.linear_plan import MAX_ROWS, Plan, choose_float8_stream, choose_plan, choose_plans
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.parameter import load_parameters
from frame.models.layers.plain_matmul import PlainMatmul
from frame.plugins.devices import open_platform
from frame.quantization.plain import Plain
from frame.testing.gemm_kernels import make_gemm_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# the interpreter truncates bfloat16
UNIT = {torch.bfloat16: 2**-8 if DEVICE.type == "cuda" else 2**-7, torch.float16: 2**-11}
VECTOR = Plan("vector", warps=1, depth=2, outputs=4)
FRAGMENT = Plan("fragment", warps=2, depth=2, chunks=2)
SHALLOW = Plan("fragment", warps=4, depth=1, chunks=1)
WIDE = Plan("tile", warps=4, depth=3, outputs=64, chunks=2)
NARROW = Plan("tile", warps=4, depth=3, outputs=16, chunks=1)

each_type = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def random(*shape: int, dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    """Random rows; consecutive rows are `gap` elements further apart than they are long."""
    return torch.randn(*shape[:-1], shape[-1] + gap).to(DEVICE, dtype)[..., : shape[-1]]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    whole = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not gated:
        return whole
    gate, up = whole.to(x.dtype).double().chunk(2, -1)
    return F.silu(gate) * up


def check(
    plan: Plan, rows: int, outputs: int, inputs: int, dtype: torch.dtype, gap: int = 0, biased: bool = False, gated: bool = False
) -> None:
    x = random(rows, inputs, dtype=dtype, gap=gap)
    weight = random(outputs, inputs, dtype=dtype, gap=2 * gap) / inputs**0.5
    bias = random(outputs, dtype=dtype) if biased else None
    got = skinny_linear(x, weight, bias, plan, gated=gated)
    want = reference(x, weight, bias, gated)
    assert got.dtype == dtype
    assert got.shape == want.shape
    # gate and up are rounded before they are multiplied, perhaps in the other direction than the
    # reference
    unit = UNIT[dtype] * (4 if gated else 1)
    torch.testing.assert_close(got.double(), want, rtol=1.01 * unit, atol=unit / 4)


@each_type
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_vector(rows: int, gated: bool, dtype: torch.dtype) -> None:
    check(VECTOR, rows, 16, 512, dtype, gated=gated)
    check(VECTOR, rows, 16, 1024, dtype, gap=8, gated=gated)
    check(VECTOR, rows, 10, 300, dtype, gap=4, biased=True, gated=gated)


@each_type
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17])
def test_fragment(rows: int, gated: bool, dtype: torch.dtype) -> None:
    check(FRAGMENT, rows, 64, 512, dtype, gated=gated)
    check(SHALLOW, rows, 32, 384, dtype, gap=8, gated=gated)
    check(FRAGMENT, rows, 22, 100, dtype, gap=4, biased=True, gated=gated)


@each_type
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [3, 16, 33, 64])
def test_tiles(rows: int, gated: bool, dtype: torch.dtype) -> None:
    check(WIDE, rows, 256, 256, dtype, gated=gated)
    check(WIDE, rows, 150, 100, dtype, gap=4, biased=True, gated=gated)
    check(NARROW, rows, 64, 256, dtype, gap=8, gated=gated)
    check(NARROW, rows, 22, 300, dtype, biased=True, gated=gated)


@each_type
def test_rows_are_independent(dtype: torch.dtype) -> None:
    """The values of other rows, NaN included, do not affect a row."""
    for some, rows in ((VECTOR, 2), (FRAGMENT, 8), (WIDE, 20), (NARROW, 5)):
        x, weight = random(rows, 128, dtype=dtype), random(32, 128, dtype=dtype)
        want = skinny_linear(x, weight, None, some)[1]
        x[0], x[2:] = float("nan"), float("inf")
        assert torch.equal(skinny_linear(x, weight, None, some)[1], want)


@each_type
def test_a_product_is_the_same_for_every_kernel(dtype: torch.dtype) -> None:
    weight, bias = random(96, 160, dtype=dtype) / 12, random(96, dtype=dtype)
    gemm = PlainMatmul(weight)
    for rows in (1, 2, 5, 16, MAX_ROWS, MAX_ROWS + 1):
        x = random(rows, 160, dtype=dtype)
        want = reference(x, weight, bias, gated=False)
        torch.testing.assert_close(gemm(x, weight, bias).double(), want, rtol=1.01 * UNIT[dtype], atol=UNIT[dtype])
        gated = gemm.multiply_gated(x, weight, bias)
        if gated is not None:
            torch.testing.assert_close(gated.double(), reference(x, weight, bias, gated=True), rtol=4 * UNIT[dtype], atol=UNIT[dtype])
    assert choose_plan(1, 96, 160) is not None
    assert gemm.multiply_gated(random(MAX_ROWS + 1, 160, dtype=dtype), weight) is None
    assert gemm(x[None], weight).shape == (1, MAX_ROWS + 1, 96)
    assert gemm(x[:0], weight).shape == (0, 96)


def test_plans_that_exceed_shared_memory_use_pytorch() -> None:
    assert choose_plans(4096, 14336)[8] == choose_plan(8, 4096, 14336)
    assert choose_plans(4096, 14336, shared_memory=100 << 10)[8] is None
    assert choose_plans(4096, 14336, shared_memory=100 << 10)[1] == choose_plan(1, 4096, 14336)


@pytest.mark.parametrize("rows", [1, 3, 8, 20, MAX_ROWS])
def test_large_weights_are_streamed_where_supported(rows: int) -> None:
    for outputs, inner, gated in ((6144, 4096, False), (28672, 4096, True), (4096, 14336, False), (3072, 4096, False), (4096, 2048, False)):
        some = choose_plans(outputs, inner, gated, streams=True)[rows]
        assert some is not None
        assert some.kernel == "stream"
        assert (outputs // 2 if gated else outputs) % some.outputs == 0
        boxes = (some.outputs * (2 if gated else 1) + max(8, rows)) * 64 * some.chunks * some.depth
        assert some.depth >= 3
        assert boxes < 227 << 10
        assert choose_plans(outputs, inner, gated)[rows] != some
    # gpt-oss: 2,880 outputs in 120 slices
    assert [choose_plan(8, outputs, 4096, streams=True).outputs for outputs in (2048, 9216, 2880)] == [16, 72, 24]  # type: ignore[union-attr]
    # unequal slices, too few weights, short slices, too many slices
    for outputs, inner in ((4096 + 8, 4096), (1024, 1024), (1024, 16384), (128 * 1187, 4096)):
        assert choose_plans(outputs, inner, streams=True) == choose_plans(outputs, inner)


@pytest.mark.parametrize("rows", [1, 11])
def test_large_float8_weights_are_streamed_for_few_rows(rows: int) -> None:
    for outputs, inner, gated in ((34816, 5120, True), (7168, 5120, False), (5120, 17408, False), (28672, 4096, True)):
        some = choose_float8_stream(rows, outputs, inner, gated)
        assert some is not None
        assert (outputs // 2 if gated else outputs) % some.outputs == 0
        assert 32 * some.chunks <= 256  # inputs that the MMA sums with few bits
        assert some.depth >= 2
        assert (some.outputs * (2 if gated else 1) + max(8, rows)) * 32 * some.chunks * some.depth < 227 << 10
        assert choose_float8_stream(17, outputs, inner, gated) is None
    for outputs, inner in ((4096, 4096), (5120 + 8, 5120)):  # too few weights, unequal slices
        assert choose_float8_stream(rows, outputs, inner) is None


def test_one_row_is_streamed_where_the_cuda_cores_are_slower() -> None:
    for inner, kernel in ((4096, "stream"), (5120, "vector")):
        some = choose_plans(5120, inner, streams=True)[1]
        assert some is not None
        assert some.kernel == kernel


def test_float32_uses_pytorch() -> None:
    weight, x = random(96, 160, dtype=torch.float32), random(2, 160, dtype=torch.float32)
    gemm = PlainMatmul(weight)
    assert torch.equal(gemm(x, weight), F.linear(x, weight))
    assert gemm.multiply_gated(x, weight) is None


@each_type
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS + 1])
def test_a_feed_forward_layer(dtype: torch.dtype, rows: int) -> None:
    bare = BuildContext(platform=open_platform(DEVICE), device=DEVICE, dtype=dtype, tp=LocalGroup(), limits=Limits(8, 512, 256, 4))
    context = replace(bare, weight_format=Plain(FormatContext(dtype)), gemm_kernels=make_gemm_kernels(bare))
    with torch.device(DEVICE):
        layer = GatedMLP(context, "mlp", 96, 64)
    weights = [random(128, 96, dtype=dtype) / 8, random(96, 64, dtype=dtype) / 8]
    gate, up = weights[0].chunk(2)
    load_parameters(layer, [("mlp.gate_proj.weight", gate), ("mlp.up_proj.weight", up), ("mlp.down_proj.weight", weights[1])])
    for linear in (layer.gate_up_proj, layer.down_proj):
        linear.process_weights_after_loading()  # a CPU may pack bfloat16
    x = random(rows, 96, dtype=dtype)
    inner = reference(x, weights[0], None, gated=True).to(dtype)
    torch.testing.assert_close(layer(x).double(), reference(inner, weights[1], None, gated=False), rtol=0.05, atol=8 * UNIT[dtype])
