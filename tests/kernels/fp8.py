"""Products of fp8 rows, and quantization to fp8, against float64, over shapes and scales.

Collected by `tests/gpu/test_fp8.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frame import kernels
from frame.core.interfaces.moe import DispatchOutput
from frame.kernels.linear.fp8_linear import Plan, choose_plan, skinny_fp8_linear
from frame.kernels.linear.fp8_quantize import FP8, quantize_groups, quantize_rows, rescale_
from frame.models.layers.parameter import Range, ShardedParameter
from frame.plugins.moe_runners.torch_native import TorchNative
from frame.plugins.moe_runners.triton import Triton
from frame.quantization.fp8 import Fp8Experts, RoundedExperts
from frame.quantization.fp8_format import Fp8Format
from frame.quantization.fp8_matmul import Fp8Matmul
from frame.quantization.fp8_weights import Scales, dequantize, quantize_blocks, quantize_outputs
from frame.testing.attention_cases import build_context
from frame.testing.checkpoints import load_reference
from tests.models.harness import open_session
from tests.quantization.fp8_checkpoints import make_pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
# relative to the largest value: rounding of the result, and the tensor cores' accumulation
CLOSE = 1e-5 if DEVICE.type == "cpu" else 0.008
LARGE = DEVICE.type == "cuda"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, DTYPE)


def weight_of(outputs: int, inputs: int, is_block: bool) -> tuple[torch.Tensor, Scales]:
    weight = torch.randn(outputs, inputs, device=DEVICE) * torch.rand(outputs, 1, device=DEVICE) * 4
    if is_block:
        numbers, scale = quantize_blocks(weight)
        return numbers, Scales(scale, 128, 128)
    numbers, scale = quantize_outputs(weight)
    return numbers, Scales(scale)


def check(got: torch.Tensor, want: torch.Tensor, close: float = CLOSE) -> None:
    assert torch.isfinite(got).all()
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error <= close, f"largest error {error:.2e} of the largest number"


def spread(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantized rows."""
    return numbers.double() * scale.double().repeat_interleave(numbers.shape[1] // scale.shape[1], 1)


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


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (208, 640), *([(4096, 4096), (6144, 1024), (28672, 512)] if LARGE else [])])
def test_few_rows(rows: int, outputs: int, inputs: int, is_block: bool) -> None:
    torch.manual_seed(rows)
    weight, scales = weight_of(outputs, inputs, is_block)
    x, bias = random(rows, inputs), random(outputs)
    numbers, scale = quantize_groups(x) if is_block else quantize_rows(x)
    want = spread(numbers, scale)[:rows] @ dequantize(weight, scales, torch.float64).T
    counter = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
    block = (scales.rows, scales.columns)
    plans = [choose_plan(rows, outputs, inputs, scales.columns), Plan(32, 64, 2, split=2), Plan(64, 128, 3)]
    for plan in plans if LARGE or rows == 3 else plans[:1]:
        for with_bias in (None, bias):
            out = skinny_fp8_linear(
                numbers,
                scale,
                weight,
                scales.values,
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
    weight, scales = weight_of(outputs, inputs, is_block)
    product = Fp8Matmul.create(weight, scales, DTYPE)
    assert product is not None
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
    check(rescale_(out, by_row, by_column), want)


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 33, 65, *([300, 1024] if LARGE else [])])
def test_a_product_is_close_to_the_dequantized_one(rows: int, is_block: bool) -> None:
    torch.manual_seed(rows)
    weight, scales = weight_of(256, 384, is_block)
    product = Fp8Matmul.create(weight, scales, DTYPE)
    assert product is not None
    x, bias = random(rows, 2, 384)[:, 1], random(256)
    want = x.double() @ dequantize(weight, scales, torch.float64).T + bias.double()
    out = product(x, weight, bias)
    assert out.shape == want.shape
    assert out.dtype == DTYPE
    if rows:
        check(out, want, 0.04)
        check(product(x[:, None], weight, bias)[:, 0], out.double(), 1e-6)


@pytest.mark.skipif(not LARGE, reason="graphs need a GPU")
@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_a_captured_product(rows: int, is_block: bool) -> None:
    weight, scales = weight_of(4096, 1024, is_block)
    product = Fp8Matmul.create(weight, scales, DTYPE)
    assert product is not None
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


def test_unsupported_weights_have_no_product() -> None:
    weight, scales = weight_of(250, 384, False)
    assert Fp8Matmul.create(weight, scales, DTYPE) is None
    weight, scales = weight_of(256, 192, True)
    assert Fp8Matmul.create(weight, scales, DTYPE) is None
    weight, scales = weight_of(256, 384, True)
    assert Fp8Matmul.create(weight, Scales(scales.values.repeat_interleave(2, 0), 64, 128), DTYPE) is None


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each 128 outputs as if they were one checkpoint tensor: e4m3, and its scale for each
    output."""
    scale = weight.unflatten(0, (-1, 128)).abs().amax((1, 2)).repeat_interleave(128) / 448
    return (weight / scale[:, None]).to(FP8), scale


@pytest.mark.parametrize(
    "method",
    [
        Fp8Experts(Fp8Format("block", "weight_scale_inv")),
        Fp8Experts(Fp8Format("block")),
        Fp8Experts(Fp8Format("tensor")),
        Fp8Experts(Fp8Format("channel")),
        RoundedExperts(),
    ],
    ids=["blocks", "blocks of compressed tensors", "tensors", "outputs", "rounded"],
)
def test_experts_stay_fp8_for_a_runner_that_takes_them(method: Fp8Experts) -> None:
    torch.manual_seed(0)
    context = build_context(DEVICE, DTYPE, 16)
    x, ids, weights = random(5, 256), torch.randint(4, (5, 2), device=DEVICE), torch.rand(5, 2, device=DEVICE)
    numbers = {"gate_up": torch.randn(4, 256, 256), "down": torch.randn(4, 256, 128)}
    outs = {}
    for runner in (Triton(context), TorchNative(context)):
        layer = torch.nn.Module()
        layer.takes_fp8 = runner.takes_fp8  # type: ignore[assignment]
        with DEVICE:
            method.create_weights(layer, 4, 256, 128, DTYPE)
        for name, weight in numbers.items():
            parameter = layer.get_parameter(name)
            assert isinstance(parameter, ShardedParameter)
            for expert, part in enumerate(weight):
                parameter.bind(f"{name}.{expert}", Range.whole(part.shape[0]), Range.whole(part.shape[1]), expert)
                if isinstance(method, RoundedExperts):
                    parameter.load(f"{name}.{expert}", part)
                    continue
                stored = method._stored
                quantize = {"block": quantize_blocks, "tensor": by_tensor, "channel": quantize_outputs}[stored.sharing]
                rounded, scale = quantize(part.to(DEVICE))
                parameter.load(f"{name}.{expert}", rounded)
                kept = layer.get_parameter(name + stored.scale.removeprefix("weight")).data
                kept[expert] = scale.view(kept[expert].shape)
        method.process_weights(layer)
        method.process_weights(layer)
        assert (layer.gate_up.dtype == FP8) == bool(runner.takes_fp8)
        outs[type(runner).__name__] = runner.run(DispatchOutput(x, ids, weights), layer)
    check(outs["Triton"], outs["TorchNative"].double(), 0.08)  # a runner may quantize activations too


@pytest.mark.skipif(LARGE, reason="tests/gpu run engines")
@pytest.mark.parametrize(("architecture", "dialect"), [("LlamaForCausalLM", "block"), ("Qwen3MoeForCausalLM", "channel")])
def test_a_model_whose_layers_stay_fp8(architecture: str, dialect: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "moe_intermediate_size": 128}
    stored, plain = make_pair(architecture, dialect, tmp_path, **sizes)
    tokens = list(range(20, 30))
    session = open_session(stored, quantization="fp8")
    assert any(getattr(module, "product", None) is not None for module in session.model.modules())  # type: ignore[attr-defined]
    got = torch.cat((session.step([(0, tokens[:8])])[0], *(session.step([(0, [token])])[0] for token in tokens[8:])))
    with torch.no_grad():
        want = load_reference(plain)(torch.tensor([tokens])).logits[0]
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.09
