"""Tensors that checkpoints may hold in another form, or beside those that a model reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.models.kimi_linear import KimiLinearForCausalLM
from frame.models.minimax_m2 import MiniMaxM2ForCausalLM
from frame.models.mixtral import MixtralForCausalLM
from tests.models.harness import open_session
from tests.models.test_logits import ARCHITECTURES, check

DENSE = ["Phi3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "CohereForCausalLM", "Glm4MoeForCausalLM"]
STACKED = [
    *(f"{name}ForCausalLM" for name in ("Qwen3Moe", "DeepseekV2", "DeepseekV3", "Glm4Moe", "Qwen2Moe", "Qwen3Next")),
    *(f"{name}ForCausalLM" for name in ("Mixtral", "MiniMaxM2")),
]
_LAYERS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *DENSE])
def test_stored_rotary_frequencies_are_ignored(
    architecture: str, tmp_path: Path, checkpoint: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    """transformers stored them in each layer, until version 4.31."""
    plain = checkpoint(architecture)
    stored = copy(plain, tmp_path, {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(8) for layer in (0, 1)})
    check(open_session(stored), reference(plain))


@pytest.mark.parametrize("architecture", STACKED)
def test_experts_of_a_layer_may_be_one_tensor(
    architecture: str, tmp_path: Path, checkpoint: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    """As transformers 5 names them in memory."""
    plain = checkpoint(architecture)
    tensors = load_file(plain / "model.safetensors")
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name in list(tensors):
        if matched := _EXPERT.fullmatch(name):
            prefix, number, layer = matched.groups()
            prefix = prefix.replace("block_sparse_moe", "mlp")
            experts.setdefault(prefix, {})[_LAYERS.get(layer, layer), int(number)] = tensors.pop(name)
    assert experts
    for prefix, layers in experts.items():
        gate, up, down = (
            torch.stack([tensor for (each, _), tensor in sorted(layers.items()) if each == layer]) for layer in _LAYERS.values()
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    renamed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    check(open_session(copy(plain, tmp_path, renamed, whole=True)), reference(plain))


@pytest.mark.parametrize(
    ("model", "name", "bound"),
    [
        (MixtralForCausalLM, "mlp.gate", "block_sparse_moe.gate"),
        (MiniMaxM2ForCausalLM, "mlp.gate", "block_sparse_moe.gate"),
        (KimiLinearForCausalLM, "self_attn.forget_gate.f_a_proj", "self_attn.f_a_proj"),
    ],
)
def test_names_of_modules_of_transformers(model: Any, name: str, bound: str) -> None:
    """Which adapters have, since PEFT names modules."""
    layer = "model.layers.1."
    renamed = model.map_weights(model.__new__(model), [(f"{layer}{name}.weight", torch.zeros(2, 2))])
    assert [each for each, _ in renamed] == [f"{layer}{bound}.weight"]


def copy(folder: Path, target: Path, tensors: dict[str, torch.Tensor], whole: bool = False) -> Path:
    """The checkpoint with these tensors, beside its own unless `whole`."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    kept = {} if whole else load_file(folder / "model.safetensors")
    save_file(kept | tensors, target / "model.safetensors", {"format": "pt"})
    return target
