"""The defaults of config.json are those of transformers' configuration classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frame.checkpoint.config_defaults import DEFAULTS, NESTED_SIZES
from frame.checkpoint.model_config import read_model_config


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    for key, value in DEFAULTS[kind].items():
        if kind == "gemma4_text" and "head" in key:  # sizes of layers, which transformers has layer by layer
            continue
        assert getattr(config, "default_theta" if key == "rope_theta" else key) == value, key


def test_a_missing_key_has_its_default(tmp_path: Path) -> None:
    written = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 8,
        "num_attention_heads": 2, "vocab_size": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written | {"rms_norm_eps": 1e-3}))
    config = read_model_config(tmp_path).config
    assert (config["rope_theta"], config["num_experts_per_tok"], config["rms_norm_eps"]) == (1e6, 2, 1e-3)


@pytest.mark.parametrize("family", sorted(NESTED_SIZES))
def test_sizes_of_nested_configurations_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import CONFIG_MAPPING

    nested = {"model_type": family, "vocab_size": 32064, "max_position_embeddings": 4096}
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": nested, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read, default = read_model_config(tmp_path), CONFIG_MAPPING[family]()
    assert {name: read.config[name] for name in NESTED_SIZES[family]} == {name: getattr(default, name) for name in NESTED_SIZES[family]}
    assert (read.num_kv_heads, read.num_layers) == (default.num_key_value_heads, 32)
