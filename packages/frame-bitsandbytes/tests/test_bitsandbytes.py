"""bitsandbytes checkpoints: the numbers that the library reads from its own, models of both kinds
on one and two ranks, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import frame_bitsandbytes
import pytest
import torch
from frame_bitsandbytes.format import BitsAndBytes, NF4Layer
from frame_bitsandbytes.source import BitsAndBytesSource
from safetensors.torch import load_file, save_file

from frame.config.schema import FrameConfig
from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import NF4, FormatContext
from frame.entrypoints.configuration.prepare import prepare
from frame.host.installation import is_installed
from frame.interfaces.weights import WeightSourceContext
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.models.harness import open_session
from tests.models.package_plugins import use_package
from tests.models.ranks import on_ranks
from tests.testing.failures import failures
from tests.testing.small_sizes import use_small_sizes

TOKENS = list(range(20, 44))
DATA = Path(__file__).parent / "data" / "bitsandbytes.safetensors"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 2}
STATE = "weight.quant_state.bitsandbytes__nf4"


def open_source(folder: Path) -> BitsAndBytesSource:
    return BitsAndBytesSource(WeightSourceContext(folder, torch.device("cpu"), torch.float32))


@pytest.mark.parametrize("name", ["plain", "nested", "plain 128", "nested 128", "plain 4096"])
def test_dequantization_equals_bitsandbytes(name: str, tmp_path: Path) -> None:
    shutil.copy(DATA, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    tensors = {key: source.open_tensor(f"{name}.{key}")[...] for key in ("weight", "absmax")}
    got = NF4Layer().to_canonical(tensors, tensors["weight"].shape[1] * 2).dequantize(torch.float32)
    assert torch.equal(got, source.open_tensor(f"{name}.wanted")[...])
    assert {f"{name}.weight", f"{name}.absmax"} < set(source.list_names())
    assert not [key for key in source.list_names() if "quant" in key or "nested_absmax" in key]


@pytest.mark.parametrize("block", [128, 256, 4096])
def test_blocks_run_over_the_ends_of_rows(block: int, tmp_path: Path) -> None:
    """As bitsandbytes computes it on a GPU: a weight is one sequence of blocks."""
    parts, want = nf4(torch.zeros(16, 192), block)
    save_file({f"layer.{key}": tensor for key, tensor in parts.items()}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    tensors = {key: source.open_tensor(f"layer.{key}")[...] for key in ("weight", "absmax")}
    assert tensors["absmax"].shape == source.open_tensor("layer.absmax").shape
    assert torch.equal(NF4Layer().to_canonical(tensors, 192).dequantize(torch.float32), want)


def nf4(weight: torch.Tensor, block: int = 64) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight in blocks, and the numbers that it stands for."""
    outputs, inputs = weight.shape
    quantized, scales = torch.randint(0, 16, (outputs, inputs)), torch.rand(-(-outputs * inputs // block)) * 0.1
    state = json.dumps({"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [outputs, inputs]}).encode()
    stored = {
        "weight": (quantized[:, ::2] << 4 | quantized[:, 1::2]).to(torch.uint8).reshape(-1, 1),
        "weight.absmax": scales,
        "weight.quant_map": torch.tensor(NF4),
        STATE: torch.tensor(list(state), dtype=torch.uint8),
    }
    return stored, torch.tensor(NF4)[quantized] * scales.repeat_interleave(block)[: outputs * inputs].view(outputs, inputs)


def int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    quantized, largest = torch.randint(-127, 128, weight.shape), torch.rand(len(weight)) * 0.2
    stored = {"weight": quantized.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, quantized * (largest / 127)[:, None]


def make_pair(architecture: str, bits: int, folder: Path, part: str = "_proj", block: int = 64) -> tuple[Path, Path]:
    """(a quantized checkpoint, an unquantized one with the same numbers)."""
    torch.manual_seed(0)
    plain = make_checkpoint(architecture, folder / "plain", **SIZES)
    stored = Path(shutil.copytree(plain, folder / "stored"))
    numbers = load_file(plain / "model.safetensors")
    tensors = dict(numbers)
    for name, weight in list(numbers.items()):
        if weight.dim() == 2 and part in name:
            parts, numbers[name] = nf4(weight, block) if bits == 4 else int8(weight)
            del tensors[name]
            tensors |= {name.removesuffix("weight") + key: tensor for key, tensor in parts.items()}
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    raw = json.loads((stored / "config.json").read_text())
    config = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True, "bnb_4bit_quant_type": "nf4"}
    (stored / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return stored, plain


def logits_of(folder: Path, **names: Any) -> torch.Tensor:
    session = open_session(folder, **names)
    return torch.cat((session.step([(0, TOKENS[:-1])])[0], session.step([(0, TOKENS[-1:])])[0])).float()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(("bits", "block"), [(4, 64), (4, 128), (8, 0)])
def test_models_on_one_and_two_ranks(architecture: str, bits: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, frame_bitsandbytes, "weight_source", "weight_format")
    stored, plain = make_pair(architecture, bits, tmp_path, block=block)
    with torch.no_grad():
        want = load_reference(plain)(torch.tensor([TOKENS])).logits[0]
    names = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    for kernel in ("torch", "unpacked"):
        torch.testing.assert_close(logits_of(stored, gemm_kernel=kernel, **names), want, rtol=1e-3, atol=1e-3)
    both = on_ranks(2, lambda group: logits_of(stored, tp=group, gemm_kernel="torch", **names))
    torch.testing.assert_close(both[0], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_may_be_unquantized(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5 writes them, without a note in the configuration."""
    use_package(monkeypatch, frame_bitsandbytes, "weight_source", "weight_format")
    stored, plain = make_pair("MixtralForCausalLM", bits, tmp_path, "self_attn")
    with torch.no_grad():
        want = load_reference(plain)(torch.tensor([TOKENS])).logits[0]
    got = logits_of(stored, quantization="bitsandbytes", load_format="bitsandbytes")
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("weight", lambda part: part[:-1], r"layer.weight has the shape"),
        ("weight.absmax", lambda part: part[:-1], r"layer.weight.absmax has the shape"),
        ("weight.quant_map", lambda part: part * 2, "quant_map holds other values than NF4"),
        ("weight.quant_map", None, "lacks layer.weight.quant_map"),
        (STATE, lambda part: part[:-3], "bitsandbytes__nf4 is no description"),
        (STATE, lambda part: torch.tensor(list(bytes(part.tolist()).replace(b"64", b"32")), dtype=torch.uint8), "in blocks of 32"),
        (STATE, lambda part: torch.tensor(list(bytes(part.tolist()).replace(b"[32,", b"[-32,")), dtype=torch.uint8), "sizes .-32"),
    ],
)
def test_broken_tensors_are_named(name: str, change: Any, sentence: str, tmp_path: Path) -> None:
    parts, _ = nf4(torch.zeros(32, 128))
    if change is None:
        del parts[name]
    else:
        parts[name] = change(parts[name]).contiguous()
    save_file({f"layer.{key}": tensor for key, tensor in parts.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        open_source(tmp_path)


def test_layers_beside_encoders_may_be_unquantized(tmp_path: Path) -> None:
    """Whatever names `llm_int8_skip_modules` has for them: the file says what is stored."""
    names = {"up_proj.weight": torch.float32, "down_proj.weight": torch.int8, "down_proj.SCB": torch.float32}
    tensors = {f"model.language_model.layers.0.mlp.{name}": torch.ones(4, 4).to(dtype) for name, dtype in names.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = BitsAndBytes(FormatContext(torch.float32, {"load_in_8bit": True}, tmp_path))
    layouts = [type(found.describe_layer(f"model.layers.0.mlp.{name}", "linear")).__name__ for name in ("up_proj", "down_proj")]
    assert layouts == ["PlainLayer", "Int8Layer"]


def test_other_schemes_are_refused_by_name() -> None:
    for config, sentence in (({"load_in_4bit": True}, "is 'fp4', but only nf4 is read"), ({}, "neither load_in_4bit nor load_in_8bit")):
        with pytest.raises(CheckpointError, match=sentence):
            BitsAndBytes(FormatContext(torch.float32, config))


def test_its_checkpoints_are_read_without_a_setting(tmp_path: Path) -> None:
    plugins = {} if is_installed("frame-bitsandbytes") else {"paths": [str(Path(frame_bitsandbytes.__file__).parent)]}
    names = (("bitsandbytes", "bitsandbytes"), ("safetensors", "none"))
    for folder, chosen in zip(make_pair("LlamaForCausalLM", 4, tmp_path), names, strict=True):
        resolved = prepare(FrameConfig.model_validate({"model": {"path": str(folder)}, "plugins": plugins})).resolved
        assert (resolved.choice("weight_source").name, resolved.choice("weight_format").name) == chosen


@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["small", "whole"])
def test_conformance(is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_small:
        use_small_sizes(monkeypatch)
    assert failures("weight_format", BitsAndBytes) == {}
    assert failures("weight_format", type("Int8", (BitsAndBytes,), {"conformance_config": {"load_in_8bit": True}})) == {}
    assert failures("weight_source", BitsAndBytesSource) == {}
