"""MXFP4 checkpoints in the layout of gpt-oss, against the same numbers unquantized, as transformers
dequantizes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from frame.core.errors import CheckpointError
from frame.plugins.weight_sources.dummy import RandomNumbers, RandomTensor
from frame.quantization.floats import Fp4Layer
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.models.harness import open_session
from tests.models.layers.random_adapters import RandomAdapters, follow_rows
from tests.models.ranks import on_ranks
from tests.models.test_adapters import PLACES, run
from tests.quantization.test_formats import TOKENS, logits_of


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An MXFP4 checkpoint, and the unquantized one of the same numbers."""
    plain = make_checkpoint("GptOssForCausalLM", tmp_path_factory.mktemp("plain"), hidden_size=64, intermediate_size=128)
    stored = Path(shutil.copytree(plain, tmp_path_factory.mktemp("mxfp4") / "model"))
    generator, tensors = torch.Generator().manual_seed(0), load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float().contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(packed, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (stored / "config.json").write_text(json.dumps(config))
    return stored, plain


def test_logits_are_those_of_the_numbers_that_the_quantized_values_stand_for(pair: tuple[Path, Path]) -> None:
    stored, plain = pair
    names = {"quantization": "mxfp4", "attention": "torch_native"}
    with torch.no_grad():
        want = load_reference(plain)(torch.tensor([TOKENS])).logits[0]
    for kernel in ("torch", "unpacked"):
        got = logits_of(open_session(stored, gemm_kernel=kernel, **names))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    both = on_ranks(2, lambda group: logits_of(open_session(stored, tp=group, gemm_kernel="torch", **names)))
    torch.testing.assert_close(both[0], want, rtol=1e-3, atol=1e-3)


def test_a_tensor_of_another_shape_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair[0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name] = tensors[name][:, :, :1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="down_proj.scales"):
        open_session(folder, quantization="mxfp4", gemm_kernel="torch")


def test_dummy_weights_have_the_deviation_of_unquantized_ones() -> None:
    numbers, outputs, inputs = RandomNumbers(0, torch.device("cpu"), torch.bfloat16), 64, 256
    shapes = {"blocks": (outputs, inputs // 2), "scales": (outputs, inputs // 32)}
    tensors = {name: RandomTensor(f"layer.{name}", shape, numbers, torch.uint8)[:] for name, shape in shapes.items()}
    weight = Fp4Layer("blocks", "scales", 32).to_canonical(tensors, inputs).dequantize(torch.float32)
    assert 0.7 < float(weight.std()) * inputs**0.5 < 1.4


@pytest.mark.parametrize("kernel", ["torch", "unpacked"])
def test_adapters_beside_packed_experts(kernel: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (stored, plain), adapters = pair, RandomAdapters()
    got = run(follow_rows(open_session(stored, quantization="mxfp4", gemm_kernel=kernel, adapters=adapters), adapters, PLACES))
    for slot, place in PLACES.items():
        with monkeypatch.context() as patch:
            if place >= 0:
                adapters.merge_loads(place, patch)
            want = run(open_session(plain))
        torch.testing.assert_close(got[slot], want[slot], atol=1e-3, rtol=1e-3)
