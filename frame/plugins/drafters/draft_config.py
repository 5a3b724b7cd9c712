"""Reads the config.json of a head that drafts. Used by the drafters eagle3 and medusa. Must
not know their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from frame.core.errors import ConfigurationError


def read_draft_config(folder: str | None, drafter: str) -> dict[str, Any]:
    """The file's entries. Raises ConfigurationError if it cannot be read, and for a quantized
    head."""
    path = Path(folder or "") / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"speculative.draft_model_path: {path} cannot be read ({error}); name the folder of a head for {drafter}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"speculative.draft_model_path: {path} is no JSON object; name the folder of a head for {drafter}")
    if config.get("quantization_config"):
        raise ConfigurationError(f"speculative.draft_model_path: {path} has a quantization_config; use an unquantized head for {drafter}")
    return config
