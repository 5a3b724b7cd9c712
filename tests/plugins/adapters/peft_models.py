"""Tiny models of transformers, and adapters that PEFT makes for them, with the merged weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from frame.interfaces.adapter import AdapterContext, AdapterFormat, LowRankDelta

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40, "head_dim": 6}
EXPERTS = {"num_experts": 12, "num_local_experts": 12, "num_experts_per_tok": 2}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": SIZES | {"intermediate_size": 56},
    "gemma3_text": SIZES | {"intermediate_size": 56},
    "qwen3_moe": SIZES | EXPERTS | {"intermediate_size": 56, "moe_intermediate_size": 20},
    "mixtral": SIZES | EXPERTS | {"intermediate_size": 20},
    "gpt_oss": SIZES | EXPERTS | {"intermediate_size": 24},  # down_proj is square
    "llama4_text": SIZES | EXPERTS | {"intermediate_size": 20, "intermediate_size_mlp": 20, "num_local_experts": 3},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32},
}


@dataclass(frozen=True)
class Made:
    """An adapter that PEFT saved, and the weights of the model without and with it."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]


def make_model(model_type: str, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**CONFIGS[model_type], "tie_word_embeddings": False, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).float()


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Give all factors random values."""
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.mul_(1 + torch.rand_like(parameter))
        elif "lora_" in name:
            parameter.copy_(torch.randn_like(parameter))


def load(folder: Path, base: dict[str, torch.Tensor], merged: dict[str, torch.Tensor]) -> Made:
    """The files of an adapter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    return Made(config, load_file(folder / "adapter_model.safetensors"), base, merged)


def make_adapter(folder: Path, model_type: str, changes: Mapping[str, Any] | None = None, **options: Any) -> Made:
    """Save an adapter for a random model, with random factors. `options`: those of LoraConfig."""
    import peft

    model = make_model(model_type, **(changes or {}))
    base = {name: value.clone() for name, value in model.state_dict().items()}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    randomize(model)
    model.save_pretrained(folder)
    merged = {} if options.get("alora_invocation_tokens") else model.merge_and_unload().state_dict()
    return load(folder, base, merged)


def read(target: type[AdapterFormat], made: Made) -> dict[str, LowRankDelta]:
    found = list(target(AdapterContext(torch.float32)).read_deltas(made.config, made.tensors))
    assert len(dict(found)) == len(found)
    return dict(found)


def check_merged(target: type[AdapterFormat], made: Made, is_transposed: bool = False) -> dict[str, LowRankDelta]:
    """The deltas give the weights that PEFT merges, and what has no delta is the base's."""
    left, deltas = dict(made.base), read(target, made)
    for name, delta in deltas.items():
        stored = name if name in left else f"{name}.weight"
        weight = left.pop(stored)
        flips = is_transposed and (weight.dim() == 3 or ".c_" in name)  # stacked experts, or GPT-2's Conv1D
        weight = weight.mT if flips else weight
        product = delta.b @ delta.a
        assert product.shape == weight.shape, name
        result = weight + delta.scale * product
        if delta.output_norm is not None:
            result = result * (delta.output_norm / result.norm(dim=1))[:, None]
        result = result.mT if flips else result
        assert not torch.allclose(result, made.base[stored], atol=0.01), name
        torch.testing.assert_close(result, made.merged[stored], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert deltas
    for name, weight in left.items():
        assert torch.equal(weight, made.merged[name]), name
    return deltas
