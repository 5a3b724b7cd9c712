"""Reads the config.json of a head that drafts. Used by the drafters eagle3 and medusa. Must
not know their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.core.errors import ConfigurationError

if TYPE_CHECKING:
    from frame.core.interfaces.model import ModelConfig


def read_draft_config(folder: str | None, drafter: str, target: ModelConfig) -> dict[str, Any]:
    """The file's entries. Raises ConfigurationError if it cannot be read, and for a quantized
    target: the head's layers have the target's weight format."""
    if target.quantization is not None:
        raise ConfigurationError(
            f"speculative.algorithm: {drafter} needs a checkpoint without quantization, and this one has {target.quantization};"
            " use the unquantized checkpoint, or the drafter draft_model"
        )
    path = Path(folder or "") / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"speculative.draft_model_path: {path} cannot be read ({error}); name the folder of a head for {drafter}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"speculative.draft_model_path: {path} is no JSON object; name the folder of a head for {drafter}")
    return found
