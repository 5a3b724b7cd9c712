"""PEFT's configuration: every field of LoraConfig is decided, and what is hostile is refused."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from frame.interfaces.adapter import AdapterError
from frame.plugins.adapters import peft_config
from frame.plugins.adapters.peft_config import LayerScales, PeftConfig, read_peft_config

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def test_every_field_of_peft_is_decided() -> None:
    import peft

    decided = set(PeftConfig.__struct_fields__) | peft_config._HARMLESS | set(peft_config._REFUSED)
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= decided
    read_peft_config(peft.LoraConfig(target_modules=["q_proj"]).to_dict() | {"peft_type": "LORA", "target_modules": ["q_proj"]})


MUTATING = ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga", "x")
EXPRESSIONS = ("(?=a)b", r"(a)\1", "[", "a)|(b", "(?x)a#", "a|" * 101, "(a{1000}){1000}")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', and LORA is read"),
        ({"peft_type": None}, "peft_type is None"),
        ({"bias": "all"}, "bias is 'all', and biases are left"),
        ({"lora_bias": True}, "lora_bias trains biases of the factors, which is not implemented: merge"),
        ({"modules_to_save": ["score"]}, "modules_to_save names layers that are trained whole"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "trainable_token_indices trains single rows"),
        ({"layer_replication": [[0, 2]]}, "layer_replication repeats layers"),
        ({"megatron_config": {}}, "megatron_config"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"arrow_config": {}}, "arrow_config"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"monteclora_config": {}}, "monteclora_config"),
        ({"velora_config": {}}, "velora_config"),
        *(({"init_lora_weights": name}, f"init_lora_weights '{name}' may change") for name in MUTATING),
        ({"quantum_scale": 3}, "'quantum_scale' is an unknown option: remove it"),
        ({"r": "8"}, r"r is invalid \(Expected `int`, got `str`\): save the adapter again"),
        ({"r": 0}, "r is invalid"),
        ({"r": True}, "r is invalid"),
        ({"r": 10**30}, "r is invalid"),
        ({"lora_alpha": float("nan")}, "lora_alpha is invalid"),
        ({"lora_alpha": 10**400}, "lora_alpha is invalid"),
        ({"lora_alpha": [1]}, "lora_alpha is invalid"),
        ({"use_rslora": "yes"}, "use_rslora is invalid"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is invalid"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern.* is invalid"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.* is invalid"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters is invalid"),
        ({"alora_invocation_tokens": [-1]}, "alora_invocation_tokens.* is invalid"),
        ({"alora_invocation_tokens": "hi"}, "alora_invocation_tokens is invalid"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is invalid"),
        *(({"rank_pattern": {key: 3}}, "has the key .*, but 32 expressions of 200 letters") for key in EXPRESSIONS),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AdapterError, match=sentence) as caught:
        read_peft_config(CONFIG | change)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("change", [{"modules_to_save": []}, {"later_option": None}, {"later_option": {}}, {"lora_dropout": 0.1}], ids=str)
def test_options_that_are_off(change: dict[str, Any]) -> None:
    before = CONFIG | change
    read_peft_config(before)
    assert before == CONFIG | change


def test_the_first_pattern_counts() -> None:
    patterns = {"^model.q_proj": 3, r"a\.q_proj$": 5, "q_proj": 7, "model.a.q_proj": 9}
    scales = LayerScales(read_peft_config(CONFIG | {"rank_pattern": patterns, "alpha_pattern": {"v_proj": 8}}))
    assert [scales.find_rank(name) for name in ("model.q_proj", "model.a.q_proj", "model.aq_proj", "x.q_proj", "k_proj")] == [3, 5, 2, 7, 2]
    patterns = {r"layers\.[02]\..*(q|k)_proj": 3, "q_proj": 5, r".*\d+\.k_proj": 6, "^v|o_proj": 7}
    scales = LayerScales(read_peft_config(CONFIG | {"rank_pattern": patterns, "alpha_pattern": {"v_proj": 8}}))
    names = ("model.layers.2.attn.q_proj", "layers.1.q_proj", "xlayers.2.a.k_proj", "m.12.k_proj", "a.o_proj", "v_proj", "v", "a.v")
    assert [scales.find_rank(name) for name in names] == [3, 5, 2, 6, 7, 2, 7, 2]
    scales = LayerScales(read_peft_config(CONFIG | {"alpha_pattern": {"v_proj": 8}, "rank_pattern": {"q_proj": 7}}))
    assert [scales.find_scale(name) for name in ("v_proj", "k_proj", "q_proj")] == [4.0, 2.0, 4 / 7]


def test_many_patterns_take_no_time() -> None:
    patterns = {f"layers.{index}.{'a' * 500}": 3 for index in range(10_000)}
    start = time.process_time()
    scales = LayerScales(read_peft_config(CONFIG | {"rank_pattern": patterns}))
    assert all(scales.find_rank(f"model.layers.{index}.{'a' * 499}") == 2 for index in range(10_000))
    assert time.process_time() - start < 5


def test_hostile_expressions_take_no_time() -> None:
    keys = ["(a+)+b$", "(.*)*x", *(f".*a{'.' * 180}({index})?" for index in range(30))]
    with pytest.raises(AdapterError, match="but 32 expressions"):
        read_peft_config(CONFIG | {"rank_pattern": dict.fromkeys([*keys, "x|y"], 3)})
    scales = LayerScales(read_peft_config(CONFIG | {"rank_pattern": dict.fromkeys(keys, 3)}))
    start = time.process_time()
    assert scales.find_rank("ab" * 450 + "c") == 3
    assert time.process_time() - start < 2


def test_expressions_that_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "_MAX_SECONDS", 0.0)
    with pytest.raises(AdapterError, match="the expressions of rank_pattern take too long: write the names"):
        LayerScales(read_peft_config(CONFIG)).find_rank("q_proj")
