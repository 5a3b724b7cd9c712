"""LoRA against PEFT: the deltas of adapters that PEFT makes, for every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frame.interfaces.adapter import AdapterContext, AdapterError
from frame.plugins.adapters.lora import LoraFormat
from tests.plugins.adapters.peft_models import Made, check_merged, load, make_adapter, make_model, randomize, read

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
TRANSPOSED = ("gpt_oss", "llama4_text")  # transformers stores their experts [inputs, outputs]
FORMAT = LoraFormat(AdapterContext(torch.float32))
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"target_modules": LINEAR, "r": 1, "lora_alpha": 3}),
        ("llama", {"target_modules": LINEAR, "r": 8, "lora_alpha": 32, "use_rslora": True}),
        ("llama", {"target_modules": LINEAR, "r": 64, "lora_alpha": 16}),
        ("llama", {"target_modules": "all-linear", "exclude_modules": ["o_proj"], "layers_to_transform": None}),
        ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 4, "lora_alpha": 2}),
        ("gemma3_text", {"target_modules": LINEAR, "r": 3}),
        ("gemma3_text", {"target_modules": ["embed_tokens", "v_proj"], "r": 3}),
        ("qwen3_moe", {"target_modules": ATTENTION, "target_parameters": STACKED, "r": 3, "lora_alpha": 5}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.down_proj"], "r": 3, "use_rslora": True}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["1.mlp.experts.gate_up_proj", "gate.weight"]}),
        ("gpt_oss", {"target_modules": ATTENTION, "target_parameters": STACKED, "r": 3}),
        ("gpt_oss", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
        ("llama", {"target_modules": LINEAR, "rank_pattern": {"v_proj": 3, "^model.layers.0.self_attn.q_proj": 2}, "r": 4}),
        ("llama", {"target_modules": LINEAR, "alpha_pattern": {"layers.1.mlp.up_proj": 9, r"layers\.1\.mlp\.up_proj$": 1, "q_proj": 2.5}}),
        ("llama", {"target_modules": ["q_proj"], "rank_pattern": {"^q_proj": 3, "proj": 2, "layers.1": 5}}),
        (
            "llama",
            {
                "target_modules": LINEAR,
                "rank_pattern": {r".*\.1\..*(q_proj|down_proj)": 12, r".*(o_proj|up_proj)": 2, "model.layers.0.self_attn.q_proj": 9},
                "alpha_pattern": {r".*\.\d+\..*(k_proj|gate_proj)$": 24, "proj|v_proj": 3},
            },
        ),
        (
            "qwen3_moe",
            {
                "target_modules": ["q_proj"],
                "target_parameters": STACKED,
                "rank_pattern": {"experts.down_proj": 2, "gate_up_proj": 3},
                "alpha_pattern": {"0.mlp.experts.down_proj": 5},
                "use_rslora": True,
            },
        ),
        ("mixtral", {"target_modules": ATTENTION, "target_parameters": STACKED[::-1], "r": 2}),
        ("llama4_text", {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    ],
    ids=str,
)
def test_deltas_are_what_peft_merges(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    made = make_adapter(tmp_path, model_type, **options)
    check_merged(LoraFormat, made, is_transposed=model_type in (*TRANSPOSED, "gpt2"))
    config = FORMAT.read_config(made.config)
    assert config.rank == max(options.get("r", 8), *options.get("rank_pattern", {}).values(), 1)
    assert config.invocation == ()


def test_invocation_and_base_model(tmp_path: Path) -> None:
    made = make_adapter(tmp_path, "llama", target_modules=LINEAR, alora_invocation_tokens=[7, 9], r=2)
    config = FORMAT.read_config(made.config | {"base_model_name_or_path": "org/base"})
    assert (config.rank, config.invocation, config.base_model) == (2, (7, 9), "org/base")
    assert len(read(LoraFormat, made)) == 14


def test_pissa_is_read_where_it_is_converted(tmp_path: Path) -> None:
    import peft

    model = make_model("llama")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=LINEAR, r=4, init_lora_weights="pissa", rank_pattern={"v_proj": 2}))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    randomize(model)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(AdapterError, match="init_lora_weights 'pissa' may change the base model's weights: save it with"):
        FORMAT.read_config(load(tmp_path / "plain", {}, {}).config)
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=tmp_path / "initial")
    merged = model.merge_and_unload().state_dict()
    check_merged(LoraFormat, load(tmp_path / "converted", base, merged))


NAMED = "base_model.model.model.layers.0.mlp.{}".format
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def pair(layer: str, rank: int = 2, inputs: int = 4, outputs: int = 6) -> dict[str, torch.Tensor]:
    factors = torch.arange(rank * inputs).view(rank, inputs).float(), torch.ones(outputs, rank)
    return {f"{NAMED(layer)}.lora_{side}.weight": factor for side, factor in zip("AB", factors, strict=True)}


def read_made(tensors: dict[str, torch.Tensor], **config: Any) -> dict[str, Any]:
    return read(LoraFormat, Made(CONFIG | config, tensors, {}, {}))


def test_names_may_have_that_of_the_adapter() -> None:
    plain, expected = pair("up_proj"), read_made(pair("up_proj"))
    for other in (
        {name.replace(".weight", ".default.weight"): value for name, value in plain.items()},
        {name.removeprefix("base_model.model."): value for name, value in plain.items()},
    ):
        (found,) = read_made(other).items()
        assert found[0] in expected
        assert torch.equal(found[1].a, expected[found[0]].a)
    embedding = {"model.embed_tokens.lora_embedding_A.x": torch.ones(2, 9), "model.embed_tokens.lora_embedding_B": torch.ones(5, 2)}
    found = read_made(embedding)["model.embed_tokens"]
    assert (found.a.shape, found.b.shape) == ((2, 5), (9, 2))


def test_experts_one_by_one() -> None:
    found = read_made({name: value for expert in (0, 1, 10, 11, 2) for name, value in pair(f"experts.{expert}.gate_proj").items()})
    assert list(found) == [f"model.layers.0.mlp.experts.{expert}.gate_proj" for expert in (0, 1, 10, 11, 2)]


def test_parameters_of_equal_sizes_are_told_apart_by_their_order() -> None:
    inner, outer = pair("experts.base_layer", 6, 4, 4), pair("experts", 6, 4, 4)
    found = read_made(inner | outer, target_parameters=["experts.down_proj", "experts.up_proj"])
    assert list(found) == ["model.layers.0.mlp.experts.up_proj", "model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(found["model.layers.0.mlp.experts.up_proj"].a.flatten(0, 1), inner[f"{NAMED('experts.base_layer')}.lora_A.weight"])


@pytest.mark.parametrize(
    ("tensors", "config", "sentence"),
    [
        ({NAMED("up_proj.lora_C.weight"): torch.ones(2, 2)}, {}, r"up_proj\.lora_C\.weight' is no factor of LoRA: merge"),
        ({NAMED("up_proj.lora_B.bias"): torch.ones(6)}, {}, r"lora_B\.bias' is no factor"),
        ({NAMED("up_proj.lora_magnitude_vector"): torch.ones(6)}, {}, "magnitude_vector' does not belong to a layer of this adapter"),
        ({NAMED("up_proj.base_layer.weight"): torch.ones(6, 4), NAMED("down_proj.base_layer.weight"): torch.ones(1)}, {}, "down_proj"),
        ({NAMED("up_proj.weight"): torch.ones(6, 4)}, {}, r"up_proj\.weight' is no factor"),
        ({"base_model.model.lm_head.weight": torch.ones(6, 4)}, {}, r"lm_head\.weight' is no factor"),
        ({"base_model.model.score.modules_to_save.weight": torch.ones(6, 4)}, {}, "modules_to_save.weight' is no factor"),
        ({NAMED("gate_proj.lora_A.weight"): torch.ones(2, 4)}, {}, r"gate_proj\.lora_A\.weight' has no partner lora_B: save"),
        ({NAMED("gate_proj.lora_B.weight"): torch.ones(6, 2)}, {}, r"gate_proj\.lora_B\.weight' has no partner lora_A"),
        ({NAMED("up_proj.lora_A.weight"): torch.ones(3, 4)}, {}, "has 3 ranks, its partner 2, and adapter_config.json says 2"),
        ({NAMED("a\nb.weight"): torch.ones(6, 4)}, {}, r"a\\nb\.weight' is no factor"),
        ({NAMED("up_proj" + ".base_layer" * 100_000): torch.ones(6, 4)}, {}, "has more than 1000 letters"),
        ({}, {"r": 4}, "has 2 ranks, its partner 2, and adapter_config.json says 4"),
        ({NAMED("up_proj.lora_A.weight"): torch.ones(2, 4, 1, 1)}, {}, r"has the shape \[2, 4, 1, 1\], and two dimensions are read"),
        ({NAMED("up_proj.lora_A.weight"): torch.ones(2)}, {}, r"has the shape \[2\]"),
        ({NAMED("up_proj.lora_B.weight"): torch.full((6, 2), float("nan"))}, {}, r"lora_B\.weight' has values that are no finite numbers"),
        ({NAMED("up_proj.lora_A.weight"): torch.full((2, 4), float("-inf"))}, {}, r"lora_A\.weight' has values that are no finite"),
        ({NAMED("up_proj.lora_A.weight"): torch.ones(2, 4, dtype=torch.int8)}, {}, r"is of torch\.int8: save the adapter in float64"),
        ({NAMED("up_proj.lora_A.weight"): torch.ones(2, 4).to(torch.float8_e4m3fn)}, {}, r"is of torch\.float8_e4m3fn: save"),
        ({NAMED("up_proj.lora_A.other.weight"): torch.ones(2, 4)}, {}, "are one factor: save one adapter in a file"),
        (pair("up_proj.base_layer"), {}, "target_parameters names no parameter of 'model.layers.0.mlp.up_proj'"),
        (pair("experts.base_layer"), {}, "a wrapper inside|names no parameter|no factors"),
        (
            pair("experts"),
            {"target_parameters": ["experts.a", "experts.b"]},
            "'model.layers.0.mlp.experts' has 2 parameters that are targets, not 1",
        ),
        (
            pair("experts") | pair("experts.base_layer"),
            {"target_parameters": ["experts.a", "experts.b"]},
            r"nothing tells the parameters \['a', 'b'\] apart: target one of them",
        ),
        (
            pair("experts") | pair("experts.base_layer"),
            {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
            "its size does not fit the other parameter of 'model.layers.0.mlp.experts'",
        ),
    ],
)
def test_invalid_tensors(tensors: dict[str, torch.Tensor], config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AdapterError, match=sentence) as caught:
        read_made(pair("up_proj") | tensors, **config)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert ": " in str(caught.value)
