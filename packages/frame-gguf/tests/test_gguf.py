"""GGUF files that the library gguf writes: its own dequantization, models on one and two ranks, and
refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.config.schema import FrameConfig
from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import FormatContext
from frame.entrypoints.configuration.prepare import prepare
from frame.interfaces.weights import WeightSourceContext
from frame.plugins.loader import load_registry
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.testing.weights.canonical_weights import check_form
from tests.models.harness import open_session
from tests.models.package_plugins import use_package
from tests.models.ranks import on_ranks

gguf = pytest.importorskip("gguf")

import frame_gguf  # noqa: E402 - needs gguf
from frame_gguf import names  # noqa: E402
from frame_gguf.format import BlockLayer, Gguf  # noqa: E402
from frame_gguf.source import GgufSource  # noqa: E402

TOKENS = list(range(20, 44))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 2}


def random_blocks(kind: str, rows: int, inputs: int) -> np.ndarray:
    """Random bytes of a type, with scales of usual size."""
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(rows + inputs).integers(0, 256, (rows, inputs // size, width), np.uint8)
    scale = np.frombuffer(np.float16(0.0002 if kind == "Q6_K" else 0.003).tobytes(), np.uint8)
    for place in {"Q6_K": (208,), "Q4_K": (0, 2), "Q4_1": (0, 2)}.get(kind, (0,)):
        blocks[..., place : place + 2] = scale
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", names.KEPT)
def test_dequantization_equals_gguf(kind: str) -> None:
    data = random_blocks(kind, 6, 512)
    weight = BlockLayer(kind).to_canonical({"weight": torch.from_numpy(data)}, 512)
    check_form(weight, 6, 512)
    assert np.array_equal(weight.dequantize(torch.float32).numpy(), gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))


def ggml_name(name: str) -> str:
    """The name of a tensor of a checkpoint in a GGUF file."""
    parts = {**names._WHOLE, **{f"blk.{{}}.{key}": f"model.layers.{{}}.{value}" for key, value in names._BLOCK.items()}}
    stem, _, kind = name.rpartition(".")
    layer = next((part for part in stem.split(".") if part.isdigit()), "")
    return next(key.format(layer) for key, value in parts.items() if value.format(layer) == stem) + f".{kind}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp stores queries and keys: the halves of a head in turn."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def make_pair(architecture: str, kind: str, folder: Path, **written: Any) -> tuple[Path, Path]:
    """(a folder with a GGUF file, an unquantized checkpoint with the same numbers). `written`: put
    into config.json."""
    plain = make_checkpoint(architecture, folder / "plain", **SIZES)
    (plain / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text()) | written))
    stored = Path(shutil.copytree(plain, folder / "stored"))
    (stored / "model.safetensors").unlink()
    family = {"LlamaForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3moe"}[architecture]
    writer = gguf.GGUFWriter(stored / "model.gguf", family)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    numbers, experts, kind_of = load_file(plain / "model.safetensors"), {}, gguf.GGMLQuantizationType[kind]
    for name, weight in numbers.items():
        if weight.dim() < 2 or "_proj" not in name:
            writer.add_tensor(ggml_name(name), weight.numpy())
            continue
        data = random_blocks(kind, *weight.shape)
        numbers[name] = torch.from_numpy(gguf.quants.dequantize(data, kind_of).copy())
        if ".experts." in name:
            layer, expert, part = name.split(".")[2], name.split(".")[5], name.split(".")[6].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(expert)] = data
            continue
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0) if family == "llama" else 0
        writer.add_tensor(ggml_name(name), permuted(data, heads) if heads else data, raw_dtype=kind_of)
    for name, parts in experts.items():
        writer.add_tensor(name, np.stack([parts[index] for index in range(len(parts))]), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    return stored, plain


def logits_of(folder: Path, **keys: Any) -> torch.Tensor:
    session = open_session(folder, quantization="gguf", load_format="gguf", **keys)
    return torch.cat((session.step([(0, TOKENS[:-1])])[0], session.step([(0, TOKENS[-1:])])[0])).float()


def test_a_tied_configuration_with_a_stored_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, frame_gguf, "weight_source", "weight_format")
    stored, plain = make_pair("LlamaForCausalLM", "Q8_0", tmp_path, tie_word_embeddings=True)
    with torch.no_grad():
        want = load_reference(plain)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(stored), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("kind", [*(kind for kind in names.KEPT if kind != "Q4_1"), "Q5_0"])
def test_models_on_one_and_two_ranks(architecture: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, frame_gguf, "weight_source", "weight_format")
    stored, plain = make_pair(architecture, kind, tmp_path)
    with torch.no_grad():
        want = load_reference(plain)(torch.tensor([TOKENS])).logits[0]
    for kernel in ("torch", "unpacked"):
        torch.testing.assert_close(logits_of(stored, gemm_kernel=kernel), want, rtol=1e-3, atol=1e-3)
    if kind in ("Q6_K", "Q4_K"):  # blocks of 256 inputs are not divided
        return
    both = on_ranks(2, lambda group: logits_of(stored, tp=group, gemm_kernel="torch"))
    torch.testing.assert_close(both[0], want, rtol=1e-3, atol=1e-3)


def test_a_folder_with_a_gguf_file_needs_no_further_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = make_pair("LlamaForCausalLM", "Q4_0", tmp_path)
    registry = load_registry(installed=False)
    for kind in ("weight_source", "weight_format"):
        part = registry.kind(kind, "frame_gguf")
        getattr(frame_gguf, f"register_{kind}s")(part)
        registry.commit(part)
    monkeypatch.setattr("frame.entrypoints.configuration.prepare.load_configured", lambda *_: registry)
    config = FrameConfig.model_validate({"model": {"path": str(stored), "skip_tokenizer_init": True}, "execution": {"device": "cpu"}})
    resolved = prepare(config).resolved
    assert (resolved.choice("weight_source").name, resolved.choice("weight_format").name) == ("gguf", "gguf")
    shutil.copy(next(tmp_path.glob("*/model.safetensors")), stored)
    resolved = prepare(config).resolved
    assert (resolved.choice("weight_source").name, resolved.choice("weight_format").name) == ("safetensors", "none")


def test_kept_blocks_name_the_format_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, frame_gguf, "weight_source", "weight_format")
    stored, _ = make_pair("LlamaForCausalLM", "Q4_0", tmp_path)
    with pytest.raises(CheckpointError, match=r"proj.weight is stored in blocks of Q4_0: set model.quantization: gguf"):
        open_session(stored, load_format="gguf")


def write_file(folder: Path, architecture: str = "qwen3", **tensors: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_head_count(4)
    for name, tensor in tensors.items():
        writer.add_tensor(name.replace("__", "."), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def test_refusals_name_their_cause(tmp_path: Path) -> None:
    def refuse(sentence: str) -> None:
        names.read_places.cache_clear()
        with pytest.raises(CheckpointError, match=sentence):
            GgufSource(WeightSourceContext(tmp_path, torch.device("cpu"), torch.float32))

    refuse("holds 0 GGUF files")
    numbers = np.zeros((4, 32), np.float32)
    write_file(tmp_path, "gemma3", token_embd__weight=numbers)
    refuse("architecture 'gemma3'; of GGUF's llama")
    write_file(tmp_path, blk__0__attn_sinks__weight=numbers)
    refuse(r"holds blk.0.attn_sinks.weight, which no model")
    file = write_file(tmp_path, token_embd__weight=numbers)
    for size in (4, 100, file.stat().st_size - 64):
        whole = file.read_bytes()
        file.write_bytes(whole[:size])
        refuse("is no whole GGUF file")
        file.write_bytes(whole)
    for kind, count, sentence in ((4, 1_000_000, "what follows are missing"), (4, 2_000_000, "of more than"), (9, 1, "array of arrays")):
        array = b"x\x09\0\0\0" + kind.to_bytes(4, "little") + count.to_bytes(8, "little")
        file.write_bytes(b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + array + b"\x09\0\0\0")
        refuse(sentence)
    file.write_bytes(whole)
    names.read_places.cache_clear()
    assert GgufSource(WeightSourceContext(tmp_path, torch.device("cpu"), torch.float32)).list_names() == ["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="set model.path"):
        Gguf(FormatContext(torch.float32))


def test_a_shape_that_does_not_fit_the_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, frame_gguf, "weight_source", "weight_format")
    stored, _ = make_pair("LlamaForCausalLM", "Q8_0", tmp_path)
    raw = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**raw, "intermediate_size": 480}))
    with pytest.raises(CheckpointError, match=r"mlp.(gate|up|down)_proj.weight has the shape"):
        logits_of(stored)
