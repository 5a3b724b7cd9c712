"""fp8 checkpoints in each dialect, made from tiny unquantized ones, with unquantized twins that
hold the dequantized values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from frame.testing.checkpoints import make_checkpoint

FP8 = torch.float8_e4m3fn
CONFIGS: dict[str, dict[str, Any]] = {
    "block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "small block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 64]},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "no block": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.router"]},
}


def make_pair(architecture: str, dialect: str, folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """(an fp8 checkpoint, an unquantized one with its dequantized values)."""
    stored, plain = folder / "stored", folder / "plain"
    make_checkpoint(architecture, stored, **overrides)
    shutil.copytree(stored, plain)
    tensors = load_file(stored / "model.safetensors")
    numbers = dict(tensors)
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and "_proj" in name:
            layer = name.removesuffix(".weight")
            tensors[name], scale, spread = _rounded(weight, CONFIGS[dialect])
            numbers[name] = tensors[name].float() * spread
            suffix = "weight_scale_inv" if dialect in ("block", "small block", "no block") else "weight_scale"
            tensors[f"{layer}.{suffix}"] = scale
            if dialect in ("tensor", "modelopt"):
                tensors[f"{layer}.input_scale"] = torch.tensor(0.5)
            elif dialect == "no block":
                tensors[f"{layer}.activation_scale"] = torch.tensor([0.5])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, stored / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[dialect]}))
    return stored, plain


def _rounded(weight: torch.Tensor, config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3, the scale as it is stored, and the scale of every value."""
    block = config.get("weight_block_size")
    if block:
        scale = torch.stack([torch.stack([part.abs().max() for part in row.split(block[1], 1)]) for row in weight.split(block[0], 0)]) / 448
        spread = scale.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    elif config["quant_method"] == "compressed-tensors":
        scale = weight.abs().amax(1, keepdim=True) / 448
        spread = scale.expand_as(weight)
    else:
        scale = weight.abs().max() / 448
        spread = scale.expand_as(weight)
    return (weight / spread).clamp(-448, 448).to(FP8), scale, spread
