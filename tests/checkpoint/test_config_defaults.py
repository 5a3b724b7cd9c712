"""The defaults of config.json are those of transformers' configuration classes."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.checkpoint.config_defaults import DEFAULTS, NESTED_SIZES, SECTIONS
from frame.checkpoint.model_config import read_model_config
from frame.models.layers.rotary import find_components, read_rope_parameters


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    for key, value in DEFAULTS[kind].items():
        if kind == "gemma4_text" and "head" in key:  # sizes of layers, which transformers has layer by layer
            continue
        if key == "rope_parameters" and "rope_theta" in DEFAULTS[kind]:  # the base is a key of its own
            value = {**value, "rope_theta": DEFAULTS[kind]["rope_theta"]}
        assert getattr(config, "default_theta" if key == "rope_theta" else key) == value, key


def test_a_missing_key_has_its_default(tmp_path: Path) -> None:
    written = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 8,
        "num_attention_heads": 2, "vocab_size": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written | {"rms_norm_eps": 1e-3}))
    config = read_model_config(tmp_path).config
    assert (config["rope_theta"], config["num_experts_per_tok"], config["rms_norm_eps"]) == (1e6, 2, 1e-3)


@pytest.mark.parametrize(
    ("model_type", "architecture", "base"),
    [("gpt_oss", "GptOssForCausalLM", 777.0), ("gpt_oss", "GptOssForCausalLM", None), ("ministral3", "Ministral3ForCausalLM", 777.0)],
)
def test_the_base_beside_default_rotary_settings(tmp_path: Path, model_type: str, architecture: str, base: float | None) -> None:
    from transformers import CONFIG_MAPPING

    written = {
        "architectures": [architecture], "model_type": model_type, "num_hidden_layers": 1, "hidden_size": 8,
        "num_attention_heads": 2, "vocab_size": 16, **({} if base is None else {"rope_theta": base}),
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written))
    expected = CONFIG_MAPPING[model_type](**written).rope_parameters
    assert read_rope_parameters(read_model_config(tmp_path))["rope_theta"] == expected["rope_theta"]


@pytest.mark.parametrize("family", sorted(NESTED_SIZES))
def test_sizes_of_nested_configurations_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import CONFIG_MAPPING

    nested = {"model_type": family, "vocab_size": 32064, "max_position_embeddings": 4096}
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": nested, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read, default = read_model_config(tmp_path), CONFIG_MAPPING[family]()
    assert {name: read.config[name] for name in NESTED_SIZES[family]} == {name: getattr(default, name) for name in NESTED_SIZES[family]}
    assert (read.num_kv_heads, read.num_layers) == (default.num_key_value_heads, 32)


_OTHER_ROTARY = ("Vision", "Audio", "Talker", "Code2Wav")


@pytest.mark.parametrize("kind", SECTIONS)
def test_sections_of_positions_are_those_of_transformers(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    sections, alternates = SECTIONS[kind]
    config.head_dim = round(2 * sum(sections) / config.rope_parameters.get("partial_rotary_factor", 1.0))
    names = (name for name in vars(module) if name.endswith("RotaryEmbedding") and not any(word in name for word in _OTHER_ROTARY))
    embedding = getattr(module, next(names))(config)
    positions = torch.tensor([10, 20, 30])[:, None, None]
    cosines, _ = embedding(torch.zeros(1), positions)
    pairs = find_components(sections, alternates)
    expected = (positions.flatten()[pairs] * embedding.inv_freq[: len(pairs)]).cos()
    assert cosines.shape[-1] == 2 * len(pairs)
    forms = (cosines.flatten()[: len(pairs)], cosines.flatten()[::2])  # halves, or neighbours
    assert any(torch.allclose(form, expected, atol=1e-5) for form in forms)


@pytest.mark.parametrize(
    ("stored", "expected"), [({}, [24, 20, 20]), ({"mrope_section": [32, 16, 16], "mrope_interleaved": False}, [32, 16, 16])]
)
def test_sections_of_positions_may_be_missing(tmp_path: Path, stored: dict[str, Any], expected: list[int]) -> None:
    nested = {"model_type": "qwen3_vl_text", "num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 2, "vocab_size": 16}
    raw = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {**nested, "rope_scaling": stored}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    assert config.has_mrope
    parameters = config.config.get("rope_parameters") or config.config["rope_scaling"]
    assert parameters["mrope_section"] == expected
    assert parameters["mrope_interleaved"] is True  # whatever the file says, as in transformers
    assert config.config["rope_theta"] == 500000.0


@pytest.mark.parametrize("base", [None, 5e5])
def test_scaling_that_users_add_replaces_what_transformers_saved(tmp_path: Path, base: float | None) -> None:
    from transformers import LlamaConfig

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stored = {**json.loads(file.read_text()), "architectures": ["LlamaForCausalLM"], "rope_scaling": yarn}
    file.write_text(json.dumps(stored if base is None else {**stored, "rope_theta": base}))
    model_config = read_model_config(str(tmp_path))
    rope = read_rope_parameters(model_config)
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"], model_config.max_context) == ("yarn", 4.0, base or 1e6, 256)
    if base is not None:
        assert LlamaConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == base


def test_scaling_of_layers_that_differ_is_that_of_full_attention(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(max_position_embeddings=64, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    scaled = {"rope_type": "linear", "factor": 8.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["Gemma3ForCausalLM"], "rope_scaling": scaled}))
    model_config, expected = read_model_config(str(tmp_path)), Gemma3TextConfig.from_pretrained(tmp_path).rope_parameters
    for kind in ("full_attention", "sliding_attention"):
        rope = read_rope_parameters(model_config, kind)
        assert {key: rope[key] for key in expected[kind]} == expected[kind], kind
