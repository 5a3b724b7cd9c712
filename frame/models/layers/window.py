"""Which layers attend to a sliding window only, in the spelling of the Qwen configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layer_window(config: Mapping[str, Any], layer: int) -> int | None:
    """The window of a layer in tokens, its own position included; None when it sees everything."""
    if not config.get("use_sliding_window", False) or not config.get("sliding_window"):
        return None
    kinds = config.get("layer_types")
    slides = kinds[layer] == "sliding_attention" if kinds else layer >= config.get("max_window_layers", 28)
    return int(config["sliding_window"]) if slides else None
