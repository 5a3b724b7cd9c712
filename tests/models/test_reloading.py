"""Weights that are loaded again: every tensor that a captured graph may read stays at its address,
and the logits equal those of a fresh model bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frame.core.errors import CheckpointError
from frame.loading.loader import load_weights, process_weights_after_loading
from frame.models.layers.weights.layer_weight import replace_values, set_buffer
from tests.models.harness import Session, checkpoint_of, open_session
from tests.models.test_logits import ARCHITECTURES, NEWER
from tests.quantization.checkpoints import DIALECTS, make_pair

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "n_shared_experts": 2}),
    ("CohereForCausalLM", {"use_qk_norm": True, "tie_word_embeddings": True}),
]
TOKENS = list(range(20, 44))


def change(folder: Path, target: Path) -> Path:
    """A checkpoint with other values under the names, shapes and types of another one."""
    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors"):
        save_file({name: _change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return target


def _change(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        factor = 1 + torch.arange(tensor.numel()).remainder(7).reshape(tensor.shape) / 16
        return (tensor.float() * factor).to(tensor.dtype)
    if name.endswith(("g_idx", "shape")) or not tensor.dim():
        return tensor
    return tensor.flip(0).contiguous()


def find_tensors(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a model reaches through its own objects, by path."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from find_tensors(inner, f"{path}.{key}", seen)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from find_tensors(inner, f"{path}.{index}", seen)
    elif type(value).__module__.startswith("frame."):
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        slots = getattr(type(value), "__slots__", ())
        for name in {*getattr(value, "__dict__", {}), *names, *([slots] if isinstance(slots, str) else slots)}:
            if hasattr(value, name):
                yield from find_tensors(getattr(value, name), f"{path}.{name}", seen)


def addresses(model: nn.Module) -> dict[str, int]:
    """Of the tensors that steps read; parameters whose memory was freed have none."""
    reached = {path: tensor.data_ptr() for path, tensor in find_tensors(model) if not tensor.is_mkldnn and tensor.numel()}
    named = {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()] if not tensor.is_mkldnn}
    return {**reached, **named}


def logits_of(session: Session) -> torch.Tensor:
    """Logits of a prompt and of a decode."""
    return torch.cat((session.step([(0, TOKENS[:-1])])[0], session.step([(0, TOKENS[-1:])])[0]))


def check(folder: Path, other: Path, **names: Any) -> None:
    """Load two checkpoints one after another, and each alone."""
    first, fresh, session = (open_session(path, **names) for path in (folder, other, folder))
    model: Any = session.model
    before = addresses(model)
    load_weights(model, checkpoint_of(other))
    process_weights_after_loading(model)
    after = addresses(model)
    assert before.keys() == after.keys()
    moved = [name for name in before if before[name] != after[name]]
    assert not moved, f"{len(moved)} of {len(before)} tensors moved: {moved[:8]}"
    expected = logits_of(fresh)
    assert torch.equal(logits_of(session), expected)
    assert not torch.equal(logits_of(first), expected)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *NEWER])
def test_every_architecture_stays_at_its_addresses(architecture: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(architecture)
    check(folder, change(folder, tmp_path / "other"), attention="torch_native")


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=lambda value: str(value)[:40])
def test_variants_stay_at_their_addresses(
    architecture: str, overrides: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint(architecture, **overrides)
    check(folder, change(folder, tmp_path / "other"))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_bfloat16_models_stay_at_their_addresses(architecture: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(architecture)
    check(folder, change(folder, tmp_path / "other"), dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_format_stays_at_its_addresses(dialect: str, tmp_path: Path) -> None:
    """Layers and experts of a small model with both."""
    architecture = "Qwen3MoeForCausalLM"
    folder, _ = make_pair(architecture, dialect, tmp_path)
    config, _ = DIALECTS[dialect]
    check(folder, change(folder, tmp_path / "other"), quantization=config["quant_method"])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_weights_that_are_quantized_while_loading_stay(
    architecture: str, quantization: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint(architecture)
    check(folder, change(folder, tmp_path / "other"), quantization=quantization)


def test_values_of_another_form_are_refused() -> None:
    module = nn.Module()
    set_buffer(module, "scale", torch.ones(3))
    with pytest.raises(CheckpointError, match="scale: the weights loaded again have another form"):
        set_buffer(module, "scale", torch.ones(4))
    with pytest.raises(CheckpointError, match="layer: the weights"):
        replace_values([torch.ones(3)], [torch.ones(3, dtype=torch.float64)], "layer")
