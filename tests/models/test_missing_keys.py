"""A key that config.json leaves out means what it means to transformers' configuration class: each
native model is built without it, and with the value that transformers gives it."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import frame
from frame.checkpoint.config_fields import ConfigFields
from frame.checkpoint.model_config import read_model_config
from frame.core.errors import ConfigurationError
from frame.core.interfaces.model import ModelContext
from frame.models.layers.rotary import Rotary, compute_attention_factor, compute_frequencies
from frame.testing.checkpoints import _BASE, TINY
from frame.testing.gemm_kernels import load_own_plugins
from tests.models.harness import build_context

# Without these, config.json is not that of a model: a sentence is better than a default. Without
# eos_token_id, the tokenizer's is used. layers_block_type also says how many layers there are.
REQUIRED = frozenset(
    {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "eos_token_id", "layers_block_type"}
)
HEADS = 16  # no default of a number of key-value heads, so that such a default shows
NOT_COMPARED = ("deepseek_ocr2", "glm4v", "internvl", "kimi_k25", "whisper")  # plugins without a small configuration here


@cache
def find_native() -> dict[str, Any]:
    """The records of native models, by architecture."""
    records = load_own_plugins().records("model")
    return {name: record for record in records for name in record.capabilities.architectures or ()}


@cache
def read_source() -> str:
    """The code that reads configurations."""
    folder = Path(frame.__file__).parent
    parts = ("models", "loading", "core/interfaces", "interfaces")
    return "".join(file.read_text() for part in parts for file in (folder / part).rglob("*.py"))


def describe(value: Any) -> Any:
    """The part of an attribute that can be compared; None for others."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        return [describe(each) for each in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, dict):
        return {str(key): describe(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        left_out = ("config", "context", "model_config")
        return {each.name: describe(getattr(value, each.name, None)) for each in fields(value) if each.name not in left_out}
    return None


def describe_module(module: torch.nn.Module) -> Any:
    if isinstance(module, Rotary):
        found = compute_frequencies(module.scheme, module.scheme["dim"]).tolist(), compute_attention_factor(module.scheme)
        return [*found, module.length, module.dim, module.interleaved]
    return {name: describe(value) for name, value in vars(module).items() if not name.startswith("_") or isinstance(value, (int, float))}


def build(config: dict[str, Any], folder: Path) -> Any:
    """What a model of this configuration is: its sizes, parameters and constants; or the error."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model_config = read_model_config(folder)
        object.__setattr__(model_config, "config", ConfigFields(model_config.config))
        context = ModelContext.from_build(build_context(model_config), model_config)
        record = find_native()[model_config.architecture]
        with torch.device("meta"):
            model: Any = load_own_plugins().load(record)(context)
    except (ConfigurationError, ValueError, TypeError, ZeroDivisionError, RuntimeError, LookupError) as error:
        return re.sub(r"0x\w+", "", f"{type(error).__name__}: {error}")
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    return {"config": describe(model_config), "shapes": shapes, **{name: describe_module(each) for name, each in model.named_modules()}}


def find_differences(architecture: str, folder: Path) -> list[str]:
    from transformers import CONFIG_MAPPING

    kind, changes = TINY[architecture]
    made = CONFIG_MAPPING[kind]
    full = json.loads(made(**json.loads(json.dumps({**_BASE, **changes, "num_attention_heads": HEADS}))).to_json_string(use_diff=False))
    full |= {"architectures": [architecture], "model_type": kind}
    whole, found = build(full, folder), []
    for key in full:
        if f'"{key}"' not in read_source() or key in ("architectures", "model_type", *REQUIRED):
            continue
        rest = {name: value for name, value in full.items() if name != key}
        try:
            value = json.loads(made(**json.loads(json.dumps(rest))).to_json_string(use_diff=False)).get(key)
        except Exception:  # the default does not fit the other sizes
            value = json.loads(made().to_json_string(use_diff=False)).get(key)
        absent, present = build(rest, folder), whole if value == full[key] else build({**rest, key: value}, folder)
        if absent != present and not (value is None and "which this architecture needs" in absent):
            found.append(f"{key} {value!r:.80}: {explain(absent, present)}")
    return found


def explain(absent: Any, present: Any) -> str:
    if isinstance(absent, str) or isinstance(present, str):
        return f"{absent if isinstance(absent, str) else 'is built'!s:.150} | {present if isinstance(present, str) else 'is built'!s:.150}"
    places = [name for name in {**absent, **present} if absent.get(name) != present.get(name)]
    return f"{places[0]}: {absent.get(places[0])!s:.200} | {present.get(places[0])!s:.200}"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in TINY if name in find_native()])
def test_a_missing_key_is_transformers_default(architecture: str, tmp_path: Path) -> None:
    assert find_differences(architecture, tmp_path) == []


def test_every_native_plugin_is_compared() -> None:
    compared = {record.name for name, record in find_native().items() if name in TINY}
    assert {record.name for record in find_native().values()} - compared == set(NOT_COMPARED)
