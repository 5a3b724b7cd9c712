"""Quantization methods: the parameters of a layer after loading, the error against float32, and
whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from frame.core.interfaces.quantization import QuantizationContext
from frame.core.loading.safetensors_reader import read_weights
from frame.models.layers.packed import can_pack
from frame.models.layers.parameter import load_parameters
from frame.quantization import Int8Options
from frame.quantization.int8_weight_only import Int8Linear, Int8WeightOnly, quantize_weight
from frame.quantization.none import PlainLinear
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.models.harness import open_session


class Layer(nn.Module):
    """A bare layer, as a method gets it."""

    def __init__(self, method: PlainLinear | Int8Linear, weight: torch.Tensor) -> None:
        super().__init__()
        method.create_weights(self, weight.shape[1], [weight.shape[0]], weight.dtype)
        self.weight.bind("layer.weight")  # type: ignore[operator]
        self.method = method
        self.load(weight)

    def load(self, weight: torch.Tensor) -> None:
        assert load_parameters(self, [("layer.weight", weight)]) == {"weight"}
        self.method.process_weights(self)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [PlainLinear, Int8Linear])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_layer_multiplies(method: type[PlainLinear | Int8Linear], dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(96, 64, dtype=dtype) / 8, torch.randn(rows, 64, dtype=dtype), torch.randn(96, dtype=dtype)
    layer = Layer(method(), weight)
    want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    tolerance = (0.01 if method is Int8Linear else 1e-6) + (0.005 if dtype != torch.float32 else 0.0)
    for _ in range(2):
        error = (method().apply(layer, x, bias).float() - want).norm() / want.norm()
        assert error < tolerance, error
        layer.method.process_weights(layer)  # again, without a load: nothing changes
    assert layer.method.apply(layer, x[:0]).shape == (0, 96)
    layer.load(-weight)
    assert (layer.method.apply(layer, x, -bias).float() + want).norm() / want.norm() < tolerance


def test_packed_and_quantized_layers_free_the_weight() -> None:
    weight = torch.randn(96, 64, dtype=torch.bfloat16)
    quantized = Layer(Int8Linear(), weight)
    assert quantized.weight.numel() == 0  # type: ignore[operator]
    assert quantized.quantized.dtype == torch.int8  # type: ignore[union-attr]
    if can_pack(weight):
        assert Layer(PlainLinear(), weight).weight.numel() == 0  # type: ignore[operator]


def test_rounding_is_at_most_half_a_step() -> None:
    weight = torch.cat((torch.randn(50, 40), torch.zeros(1, 40)))
    quantized, scale = quantize_weight(weight)
    assert (weight - quantized * scale[:, None]).abs().max() <= scale.max() / 2 + 1e-7
    assert quantized[:-1].abs().amax(1).eq(127).all()
    assert not quantized[-1].any()


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.04), (torch.bfloat16, 0.06)])
def test_a_quantized_model_stays_close(architecture: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    folder = make_checkpoint(architecture, tmp_path)
    tokens = list(range(20, 60))
    session = open_session(folder, dtype=dtype, quantization="int8_weight_only")
    got = torch.cat((session.step([(0, tokens[:39])])[0], session.step([(0, tokens[39:])])[0])).float()
    with torch.no_grad():
        want = load_reference(folder)(torch.tensor([tokens])).logits[0]
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < bound
    kinds = {type(module.method).__name__ for module in session.model.modules() if hasattr(module, "method")}  # type: ignore[attr-defined]
    assert "Int8Linear" in kinds


def test_ignored_layers_stay_unquantized() -> None:
    method = Int8WeightOnly(QuantizationContext(), Int8Options(ignore=("layers.0.", "o_proj$")))
    assert isinstance(method.linear("model.layers.0.mlp.up_proj"), PlainLinear)
    assert isinstance(method.linear("model.layers.1.self_attn.o_proj"), PlainLinear)
    assert isinstance(method.linear("lm_head", "head"), PlainLinear)
    assert isinstance(method.linear("model.layers.1.mlp.up_proj"), Int8Linear)
    assert isinstance(Int8WeightOnly(QuantizationContext(), Int8Options(ignore=())).linear("a"), Int8Linear)


def test_a_checkpoint_with_scalar_tensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    ((name, tensor),) = read_weights(tmp_path)
    assert (name, tensor.shape, tensor[...].item()) == ("scale", (), 3.0)
