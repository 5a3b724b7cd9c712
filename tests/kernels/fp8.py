"""Products of fp8 rows, and quantization to fp8, against float64, over shapes and scales.

Collected by `tests/gpu/test_fp8.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from frame import kernels
from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import LayerFormat, LayerKind, WeightFormat, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.kernels.linear.fp8_linear import MAX_ROWS, Plan, choose_plan, skinny_fp8_linear
from frame.kernels.linear.fp8_quantize import FP8, quantize_groups, quantize_rows, rescale
from frame.models.layers.parameter import Range, load_parameters
from frame.models.layers.weights.expert_weights import ExpertWeights
from frame.plugins.moe_runners.torch_native import TorchNative
from frame.plugins.moe_runners.triton import Triton
from frame.quantization.fp8 import Fp8Layer, OnlineFp8Layer
from frame.quantization.fp8_format import Fp8Format
from frame.quantization.fp8_weights import quantize_blocks, quantize_outputs
from frame.quantization.gemm.int8 import Int8Kernel
from frame.quantization.gemm.w8a8_matmul import W8A8Matmul, find_obstacle
from frame.testing.checkpoints import load_reference
from frame.testing.gemm_kernels import make_gemm_kernels
from frame.testing.weights.canonical_weights import make_weight
from tests.models.harness import open_session
from tests.quantization.fp8_checkpoints import make_pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
# relative to the largest value: rounding of the result, and the tensor cores' accumulation
CLOSE = 1e-5 if DEVICE.type == "cpu" else 0.008
LARGE = DEVICE.type == "cuda"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, DTYPE)


Weight = tuple[torch.Tensor, torch.Tensor, tuple[int, int]]  # e4m3, scales, (outputs, inputs) of a scale


def weight_of(outputs: int, inputs: int, is_block: bool) -> Weight:
    weight = torch.randn(outputs, inputs, device=DEVICE) * torch.rand(outputs, 1, device=DEVICE) * 4
    if is_block:
        numbers, scale = quantize_blocks(weight)
        return numbers, scale, (128, 128)
    numbers, scale = quantize_outputs(weight)
    return numbers, scale, (1, 0)


def dequantize(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float64 numbers, by the definition."""
    if not block[1]:
        return weight.double() * scales.double()[:, None]
    values = scales.double().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.double() * values.repeat_interleave(block[1], 1)[:, : weight.shape[1]]


def check(got: torch.Tensor, want: torch.Tensor, close: float = CLOSE) -> None:
    assert torch.isfinite(got).all()
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error <= close, f"largest error {error:.2e} of the largest number"


def spread(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantized rows."""
    return numbers.double() * scale.double().repeat_interleave(numbers.shape[1] // scale.shape[1], 1)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (48, 1040), *([(4096, 4096), (28672, 4096), (4096, 14336)] if LARGE else [])])
def test_int8_products_are_exact(outputs: int, inputs: int) -> None:
    """The sums of integers equal those in int64; only scales round."""
    weight = torch.randint(-127, 128, (outputs, inputs), device=DEVICE, dtype=torch.int8)
    scales = torch.rand(outputs, 1, device=DEVICE) + 0.5
    product = W8A8Matmul(weight, scales, (1, 0))
    bias = random(outputs)
    for rows in (1, MAX_ROWS, 400) if LARGE else (3, MAX_ROWS + 6):
        x = random(rows, inputs)
        quantized, steps = quantize_rows(x, dtype=torch.int8)
        assert quantized.abs().amax(1).tolist() == [127] * rows
        assert float((quantized * steps - x).abs().amax() / steps.amax()) <= 0.51
        sums = (quantized.cpu().long() @ weight.cpu().long().t()).to(DEVICE)
        want = sums * steps.double() * scales.double().t()
        check(product(x, weight, None), want)
        check(product(x, weight, bias), want + bias.double())
        if (gated := product.multiply_gated(x, weight, None)) is not None:
            check(gated, nn.functional.silu(want[:, : outputs // 2]) * want[:, outputs // 2 :])


def test_int8_products_are_those_of_checkpoints_made_for_them() -> None:
    kernel = Int8Kernel(build_context(DEVICE, torch.bfloat16, 16))
    weight = make_weight(WeightScheme("int8"), 64, 128, dtype=torch.bfloat16)
    for name, tensor in weight.tensors.items():
        setattr(weight, name, tensor.to(DEVICE))
    assert "does not quantize activations" in str(kernel.find_obstacle(weight))
    weight.quantizes_inputs = True
    assert kernel.find_obstacle(weight) is None
    x = random(3, 128).bfloat16()
    check(kernel.prepare(weight)(x), x.double() @ weight.dequantize(torch.float32).double().t(), 0.03)


@pytest.mark.parametrize(("rows", "inputs", "gap"), [(1, 128, 0), (5, 384, 8), (66, 128, 0), (3, 1152, 0)])
def test_quantization_of_rows(rows: int, inputs: int, gap: int) -> None:
    torch.manual_seed(rows)
    x = random(rows, inputs + gap)[:, :inputs]
    x[0, :128] = 0
    for quantize, groups in ((quantize_rows, 1), (quantize_groups, inputs // 128)):
        numbers, scale = quantize(x)
        assert numbers.dtype == FP8
        assert scale.shape == (len(numbers), groups)
        top = x.float().unflatten(1, (groups, -1)).abs().amax(2)
        torch.testing.assert_close(scale[:rows], (top / 448).clamp_min(1e-12), rtol=1e-5, atol=0.0)
        error = (spread(numbers, scale)[:rows] - x.double()).abs()
        assert (error <= x.double().abs() / 16 + 2**-9 * scale[:rows].double().repeat_interleave(inputs // groups, 1)).all()
    assert quantize_groups(x)[1].stride(0) == 1


@pytest.mark.parametrize("dtype", [torch.int8, *[FP8] * LARGE], ids=str)  # Triton's interpreter makes a number of NaN in e4m3
@pytest.mark.parametrize("is_static", [False, True])
def test_rows_with_nan_stay_nan(is_static: bool, dtype: torch.dtype) -> None:
    """The engine ends a request whose logits are not finite: integers would make them finite."""
    x = random(4, 256)
    x[1, 17], x[2] = torch.nan, torch.nan
    static = torch.full((1,), 0.03, device=DEVICE) if is_static else None
    numbers, scale = quantize_rows(x, dtype=dtype, static=static)
    assert (numbers.float() * scale).sum(1).isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (208, 640), *([(4096, 4096), (6144, 1024), (28672, 512)] if LARGE else [])])
def test_few_rows(rows: int, outputs: int, inputs: int, is_block: bool) -> None:
    torch.manual_seed(rows)
    weight, scales, block = weight_of(outputs, inputs, is_block)
    x, bias = random(rows, inputs), random(outputs)
    numbers, scale = quantize_groups(x) if is_block else quantize_rows(x)
    want = spread(numbers, scale)[:rows] @ dequantize(weight, scales, block).T
    counter = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
    plans = [choose_plan(rows, outputs, inputs, block[1]), Plan(32, 64, 2, split=2), Plan(64, 128, 3)]
    for plan in plans if LARGE or rows == 3 else plans[:1]:
        for with_bias in (None, bias):
            out = skinny_fp8_linear(
                numbers,
                scale,
                weight,
                scales,
                block,
                with_bias,
                plan,
                counter,
                rows=rows,
                dtype=DTYPE,
                pdl=kernels.supports_pdl(DEVICE),
            )
            check(out, want if with_bias is None else want + bias.double())
            assert not counter.any()


def test_stages_fit_into_small_shared_memory() -> None:
    plan = Plan(64, 256, 4)
    assert plan.fit_shared_memory(232448) is not plan
    assert plan.fit_shared_memory(232448) == plan
    assert plan.fit_shared_memory(101376, 2) == Plan(64, 256, 2)
    assert plan.fit_shared_memory(48 << 10, 2) == Plan(64, 256, 1)


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [1, 17, *([64] if LARGE else [])])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 384), *([(28672, 4096), (6144, 1024)] if LARGE else [])])
def test_gated_rows(rows: int, outputs: int, inputs: int, is_block: bool) -> None:
    torch.manual_seed(rows)
    weight, scales, block = weight_of(outputs, inputs, is_block)
    product = W8A8Matmul(weight, scales, block)
    for bias in (None, random(outputs)):
        x = random(rows, inputs)
        gate, up = product(x, weight, bias).double().chunk(2, -1)
        got = product.multiply_gated(x, weight, bias)
        assert got is not None
        check(got, torch.nn.functional.silu(gate) * up, 3 * CLOSE)
    assert product.multiply_gated(random(65, inputs), weight, None) is None
    assert product.multiply_gated(random(0, inputs), weight, None) is None


def test_rescaling() -> None:
    torch.manual_seed(0)
    out, by_row, by_column = random(5, 1100), torch.rand(5, 1, device=DEVICE), torch.rand(1100, device=DEVICE)
    want = out.double() * by_row.double() * by_column.double()
    check(rescale(out, by_row, by_column), want)


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 33, 65, *([300, 1024] if LARGE else [])])
def test_a_product_is_close_to_the_dequantized_one(rows: int, is_block: bool) -> None:
    torch.manual_seed(rows)
    weight, scales, block = weight_of(256, 384, is_block)
    product = W8A8Matmul(weight, scales, block)
    x, bias = random(rows, 2, 384)[:, 1], random(256)
    want = x.double() @ dequantize(weight, scales, block).T + bias.double()
    out = product(x, weight, bias)
    assert out.shape == want.shape
    assert out.dtype == DTYPE
    if rows:
        check(out, want, 0.04)
        check(product(x[:, None], weight, bias)[:, 0], out.double(), 1e-6)


def test_a_static_scale_of_integers() -> None:
    x = random(3, 128)
    quantized, steps = quantize_rows(x, dtype=torch.int8, static=torch.tensor([0.01], device=DEVICE))
    assert float((quantized.float() - (x.float() / 0.01).clamp(-127, 127)).abs().max()) <= 0.51
    assert steps.tolist() == [[pytest.approx(0.01)]] * 3


@pytest.mark.parametrize("rows", [1, 17, *([300, 1024] if LARGE else [])])
def test_a_static_scale_rounds_every_activation(rows: int) -> None:
    """Larger activations become the largest number; of merged layers the largest scale counts."""
    torch.manual_seed(rows)
    weight, scales, block = weight_of(256, 384, False)
    step = 0.0041
    given = torch.tensor([0.001, step], device=DEVICE).repeat_interleave(128)
    product = W8A8Matmul(weight, scales, block, given)
    x, bias = random(rows, 384), random(256)
    assert float(x.abs().max()) > 448 * step
    rounded = (x.float() / step).clamp(-448, 448).to(FP8).double() * step
    check(product(x, weight, bias), rounded @ dequantize(weight, scales, block).T + bias.double())
    assert [len(tensor) for tensor in product.list_tensors(weight)] == [256, 256, 1]


@pytest.mark.skipif(not LARGE, reason="graphs need a GPU")
@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_a_captured_gemm(rows: int, is_block: bool) -> None:
    weight, scales, block = weight_of(4096, 1024, is_block)
    product = W8A8Matmul(weight, scales, block)
    x = random(rows, 1024)
    product(x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x, weight, None)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(random(rows, 1024))
        graph.replay()
        assert torch.equal(out, product(x, weight, None))


def test_unsupported_weights_have_no_gemm() -> None:
    def why(outputs: int, inputs: int, block: tuple[int, int]) -> str | None:
        return find_obstacle(torch.zeros(outputs, inputs, dtype=FP8, device=DEVICE), block)

    assert "no multiples of 16" in str(why(250, 384, (1, 0)))
    assert "not by blocks" in str(why(256, 192, (128, 128)))
    assert "not by blocks" in str(why(256, 384, (64, 128)))
    assert "not by output" in str(why(256, 384, (2, 0)))
    assert why(256, 384, (1, 0)) is None


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 with one scale."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(FP8), scale


@pytest.mark.parametrize(
    "layout",
    [
        Fp8Layer(Fp8Format("block", "weight_scale_inv")),
        Fp8Layer(Fp8Format("block")),
        Fp8Layer(Fp8Format("tensor")),
        Fp8Layer(Fp8Format("channel")),
        OnlineFp8Layer(experts=True),
    ],
    ids=["blocks", "blocks of compressed tensors", "tensors", "outputs", "rounded"],
)
def test_experts_stay_fp8_for_a_runner_that_takes_them(layout: Fp8Layer | OnlineFp8Layer) -> None:
    torch.manual_seed(0)
    x, ids, weights = random(5, 256), torch.randint(4, (5, 2), device=DEVICE), torch.rand(5, 2, device=DEVICE)
    numbers = {"gate_proj": torch.randn(4, 128, 256), "up_proj": torch.randn(4, 128, 256), "down_proj": torch.randn(4, 256, 128)}
    outs = {}
    for target in (Triton, TorchNative):
        runner = target(build_context(DEVICE, DTYPE, 16))
        layer = nn.Module()
        context = replace(
            build_context(DEVICE, DTYPE, 16), weight_format=Always(layout), moe_runner=runner,
            gemm_kernels=make_gemm_kernels(build_context(DEVICE, DTYPE, 16)),
        )  # fmt: skip
        with DEVICE:
            experts = ExpertWeights(layer, context, "experts", ("gate_proj", "up_proj", "down_proj"), (4, 256, Range.whole(128)))
        for expert in range(4):
            experts.bind(expert, expert, Range.whole(256), Range.whole(128))
        load_parameters(layer, [pair for name, weight in numbers.items() for pair in stored_tensors(layout, name, weight)])
        experts.prepare_gemms()
        experts.prepare_gemms()
        assert (layer.gate_up.dtype == FP8) == bool(runner.takes_fp8)
        assert not experts.grouped
        outs[target.__name__] = runner.run(DispatchOutput(x, ids, weights), layer)
    check(outs["Triton"], outs["TorchNative"].double(), 0.08)  # a runner may quantize activations too


class Always(WeightFormat):
    """Every layer is stored in one way."""

    def __init__(self, layout: LayerFormat) -> None:
        self.layout = layout

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        return self.layout


def stored_tensors(layout: Fp8Layer | OnlineFp8Layer, name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The checkpoint tensors of a projection of all experts."""
    if isinstance(layout, OnlineFp8Layer):
        return [(f"experts.{expert}.{name}.weight", part) for expert, part in enumerate(weight)]
    stored, found = layout.stored, []
    quantize = {"block": quantize_blocks, "tensor": by_tensor, "channel": quantize_outputs}[stored.sharing]
    for expert, part in enumerate(weight):
        rounded, scale = quantize(part.to(DEVICE))
        scale = scale[:, None] if stored.sharing == "channel" else scale
        found += [(f"experts.{expert}.{name}.weight", rounded), (f"experts.{expert}.{name}.{stored.scale}", scale)]
    return found


@pytest.mark.skipif(LARGE, reason="tests/gpu run engines")
@pytest.mark.parametrize(("architecture", "dialect"), [("LlamaForCausalLM", "block"), ("Qwen3MoeForCausalLM", "channel")])
def test_a_model_whose_layers_stay_fp8(architecture: str, dialect: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "moe_intermediate_size": 128}
    stored, plain = make_pair(architecture, dialect, tmp_path, **sizes)
    tokens = list(range(20, 30))
    session = open_session(stored, quantization="compressed-tensors" if dialect == "channel" else "fp8")
    gemms = {type(getattr(module, "gemm", None)).__name__ for module in session.model.modules()}  # type: ignore[attr-defined]
    assert "W8A8Gemm" in gemms
    got = torch.cat((session.step([(0, tokens[:8])])[0], *(session.step([(0, [token])])[0] for token in tokens[8:])))
    with torch.no_grad():
        want = load_reference(plain)(torch.tensor([tokens])).logits[0]
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.09
