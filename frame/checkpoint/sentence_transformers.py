"""Reads the files that sentence-transformers adds to a checkpoint: pooling mode, longest input and
prompts. Imports no torch.

Used by `model_config`. Knows the folder's layout (`modules.json`, `1_Pooling/config.json`, …); it
must not know how vectors are computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from frame.checkpoint.folder import check_folder, is_within, read_json
from frame.core.errors import CheckpointError
from frame.core.interfaces.model import SentenceTransformersConfig

REMEDY = "set one mode in the file: cls, last, mean, max, or the name of a pooler that is installed"


def read_sentence_config(folder: Path) -> SentenceTransformersConfig | None:
    """The folder's settings; None if it has no `modules.json`. Raises CheckpointError, one
    sentence, for an unsupported module."""
    modules = read_json(folder / "modules.json")
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{folder / 'modules.json'} is no list of modules; download it again.")
    mode: str | None = None
    normalize, pools_prompts = False, True
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            file = folder / str(module.get("path", "")) / "config.json"
            if not is_within(file, folder):
                raise CheckpointError(f"{folder / 'modules.json'} names {file}, which is outside of its folder; download it again.")
            mode = _mode(file)
            pools_prompts = _read_settings(file).get("include_prompt") is not False
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(f"{folder / 'modules.json'} has a module {kind!r}; supported are Transformer, Pooling and Normalize.")
    sizes = _read_settings(folder / "sentence_bert_config.json")
    more = _read_settings(folder / "config_sentence_transformers.json")
    prompts = {name: text for name, text in (more.get("prompts") or {}).items() if isinstance(text, str)}
    max_length, default = sizes.get("max_seq_length"), more.get("default_prompt_name")
    default = default if default in prompts else None
    if default is not None and not pools_prompts:
        raise CheckpointError(
            f"{folder} puts its prompt {default!r} before each text and pools none of its tokens (include_prompt), which is not supported; "
            "take default_prompt_name out of config_sentence_transformers.json to serve texts without a prompt."
        )
    return SentenceTransformersConfig(
        mode=mode,
        normalize=normalize,
        max_tokens=max_length if isinstance(max_length, int) and max_length > 0 else None,
        prompts=prompts,
        default_prompt=default,
        lower_case=sizes.get("do_lower_case") is True,
        pools_prompts=pools_prompts,
    )


def _mode(file: Path) -> str:
    """The name of the pooler. A mode without a built-in pooler keeps its name, which a plugin may
    have."""
    if file.parent.is_dir():
        check_folder(file.parent)
    config = _read_settings(file)
    chosen = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    named = config.get("pooling_mode")  # in newer files
    if isinstance(named, str):
        chosen = [named]
    if len(chosen) != 1:
        raise CheckpointError(f"{file} asks for {' and '.join(chosen) or 'no pooling mode'}, which is not supported; {REMEDY}.")
    name = chosen[0].removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
    return "last" if name == "lasttoken" else name


def _read_settings(file: Path) -> dict[str, Any]:
    settings = read_json(file)
    return settings if isinstance(settings, dict) else {}
