"""A layer for multi-token prediction (`mtp`) beside a checkpoint with encoders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_draft_layer(folder: Path, layer: int) -> None:
    """Add one to a checkpoint of Qwen3.5: a copy of a layer with full attention, and a projection
    that adds the token to the hidden state."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    before = f"model.language_model.layers.{layer}."
    copied = {f"mtp.layers.0.{name.removeprefix(before)}": each.clone() for name, each in weights.items() if name.startswith(before)}
    width = weights["model.language_model.norm.weight"].shape[0]
    copied["mtp.fc.weight"] = torch.cat([torch.eye(width), torch.eye(width)], 1)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        copied[f"mtp.{name}.weight"] = weights["model.language_model.norm.weight"].clone()
    save_file(weights | copied, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
