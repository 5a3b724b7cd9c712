"""Fields of config.json that are missing or of another type are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frame.checkpoint.config_fields import ConfigFields, check_fields, check_layer_list
from frame.core.errors import CheckpointError


def test_missing_fields_are_named() -> None:
    config = ConfigFields({"hidden_size": 64})
    assert config["hidden_size"] == 64
    assert config.get("intermediate_size") is None
    with pytest.raises(CheckpointError, match="has no intermediate_size, which this architecture needs"):
        config["intermediate_size"]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"rms_norm_eps": "x"}, "a.json: rms_norm_eps is 'x'; a number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"logit_scale": True}, "logit_scale is True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; a number above 0 is expected"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0; a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0; a number above 0"),
        ({"query_pre_attn_scalar": -4}, "query_pre_attn_scalar is -4; a number above 0"),
        ({"rope_scaling": {"factor": 0}}, "rope_scaling.factor is 0; a number above 0"),
        ({"rope_scaling": {"long_factor": [1.0, 0]}}, r"rope_scaling.long_factor is \[1.0, 0\]; a list of numbers above 0"),
        ({"rope_scaling": {"short_factor": "x"}}, "rope_scaling.short_factor is 'x'; a list"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; a JSON object"),
        ({"rope_parameters": {"factor": [2]}}, r"rope_parameters.factor is \[2\]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "rope_parameters.full_attention.rope_theta is 'x'"),
    ],
)
def test_other_types_are_named(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        check_fields(Path("a.json"), config)


def test_usual_fields() -> None:
    check_fields(Path("a.json"), {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_parameters": {"rope_type": "yarn", "factor": 4}})


@pytest.mark.parametrize("kinds", [5, "dense", ["dense"], ["dense", 1]])
def test_a_list_of_layers_has_an_entry_for_each(kinds: Any) -> None:
    check_layer_list(Path("a.json"), {"mlp_layer_types": ["dense", "sparse"]}, 2)
    with pytest.raises(CheckpointError, match="a.json: mlp_layer_types is .* for each of 2 layers"):
        check_layer_list(Path("a.json"), {"mlp_layer_types": kinds}, 2)
