"""Reads the files that sentence-transformers adds to a checkpoint: pooling mode, longest input and
prompts. Imports no torch.

Used by `model_config`. Knows the folder's layout (`modules.json`, `1_Pooling/config.json`, …); it
must not know how vectors are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from frame.checkpoint.folder import check_folder, is_within, read_json
from frame.core.errors import CheckpointError
from frame.core.interfaces.model import PoolingMode, SentenceTransformersConfig

MODES: Mapping[str, PoolingMode] = MappingProxyType(
    {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "last",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
    }
)
UNKNOWN = "choose one with --pooling cls, last, mean or max"


def read_sentence_config(folder: Path) -> SentenceTransformersConfig | None:
    """The folder's settings; None if it has no `modules.json`. Raises CheckpointError, one
    sentence, for an unsupported module."""
    modules = read_json(folder / "modules.json")
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{folder / 'modules.json'} is no list of modules; download it again.")
    mode: PoolingMode | None = None
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            file = folder / str(module.get("path", "")) / "config.json"
            if not is_within(file, folder):
                raise CheckpointError(f"{folder / 'modules.json'} names {file}, which is outside of its folder; download it again.")
            mode = _mode(file)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(f"{folder / 'modules.json'} has a module {kind!r}; supported are Transformer, Pooling and Normalize.")
    sizes = _read_settings(folder / "sentence_bert_config.json")
    more = _read_settings(folder / "config_sentence_transformers.json")
    prompts = {name: text for name, text in (more.get("prompts") or {}).items() if isinstance(text, str)}
    max_length = sizes.get("max_seq_length")
    return SentenceTransformersConfig(
        mode=mode,
        normalize=normalize,
        max_tokens=max_length if isinstance(max_length, int) and max_length > 0 else None,
        prompts=prompts,
        default_prompt=more.get("default_prompt_name") if more.get("default_prompt_name") in prompts else None,
    )


def _mode(file: Path) -> PoolingMode:
    if file.parent.is_dir():
        check_folder(file.parent)
    config = _read_settings(file)
    chosen = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    named = config.get("pooling_mode")  # in newer files
    if isinstance(named, str):
        known = {mode: mode for mode in MODES.values()} | {"lasttoken": "last"}
        if named in known:
            return known[named]  # type: ignore[return-value]
        chosen = [named]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise CheckpointError(f"{file} asks for {' and '.join(chosen) or 'no pooling mode'}, which is not supported; {UNKNOWN}.")
    return MODES[chosen[0]]


def _read_settings(file: Path) -> dict[str, Any]:
    settings = read_json(file)
    return settings if isinstance(settings, dict) else {}
