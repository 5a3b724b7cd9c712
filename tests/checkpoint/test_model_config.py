"""read_model_config(): configurations saved by transformers, published ones, and one sentence for
each invalid one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model, read_model_config
from frame.core.errors import CheckpointError
from frame.host.installation import install_command
from frame.testing.checkpoints import make_checkpoint
from tests.model_configs import SMALL as BASE


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 96,
}
MOE = SMALL | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA = MOE | {
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_key_value_heads": 4,
}
SAVED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Llama", SMALL | {"max_position_embeddings": 256}, {"max_context": 256, "head_dim": 16}),
    ("Llama", SMALL | {"head_dim": 32}, {"head_dim": 32, "v_head_dim": 32}),
    ("Mistral", SMALL, {"sliding_window": 4096}),
    ("Mistral", SMALL | {"sliding_window": None}, {"sliding_window": None}),
    ("Qwen2", SMALL, {"sliding_window": None}),
    ("Qwen3", SMALL | {"head_dim": 16}, {"sliding_window": None, "head_dim": 16}),
    ("Mixtral", SMALL | {"num_local_experts": 4}, {"num_experts": 4, "sliding_window": None}),
    ("Qwen2Moe", MOE | {"num_experts": 6}, {"num_experts": 6, "sliding_window": None}),
    ("Qwen3Moe", MOE | {"num_experts": 6, "head_dim": 16}, {"num_experts": 6}),
    ("DeepseekV2", MLA, {"kind": "mla", "latent": (32, 8), "head_dim": 24, "v_head_dim": 12, "num_experts": 8, "num_kv_heads": 4}),
    ("DeepseekV3", MLA, {"kind": "mla", "latent": (32, 8), "head_dim": 24, "v_head_dim": 12, "num_experts": 8, "num_kv_heads": 4}),
    ("Gemma2", SMALL | {"head_dim": 16, "sliding_window": 64}, {"sliding_window": 64, "head_dim": 16}),
    (
        "GPT2",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 99},
        {"num_layers": 3, "num_kv_heads": 4, "max_context": 99},
    ),
]


@pytest.mark.parametrize(("family", "values", "expected"), SAVED, ids=lambda value: value if isinstance(value, str) else "")
def test_configurations_saved_by_transformers(tmp_path: Path, family: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**values, architectures=[f"{family}{head}"], dtype="bfloat16", eos_token_id=2)
    config.save_pretrained(tmp_path)
    model_config = read_model_config(tmp_path)
    common = {"architecture": f"{family}{head}", "num_layers": 2, "hidden_size": 64, "vocab_size": 128, "num_heads": 4, "dtype": "bfloat16"}
    if family != "GPT2":
        common["num_kv_heads"] = 2
    for name, value in (common | {"kind": "mha", "quantization": None, "eos_token_ids": (2,)} | expected).items():
        assert getattr(model_config, name) == value, name
    assert model_config.config == {**model_config.config, **json.loads((tmp_path / "config.json").read_text())}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"model_type": "gemma4_text"}, {"head_dim": 256, "other_head_dims": (512,), "sliding_window": 512}),
        ({"head_dim": 16, "per_layer_config": {"1": {"head_dim": 32}, "2": {"head_dim": 16}}}, {"head_dim": 16, "other_head_dims": (32,)}),
        ({"dtype": "float16"}, {"dtype": "float16"}),
        ({"torch_dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"torch_dtype": "float8_e4m3fn"}, {"dtype": "bfloat16"}),
        ({}, {"dtype": "float32", "num_experts": 0, "eos_token_ids": (), "num_kv_heads": 2}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, {"quantization": "fp8"}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, {"max_context": 2048}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"max_context": 1024}),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, {"max_context": 512}),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 3, "rope_theta": 1e4}}, {"max_context": 1536}),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8}, "sliding_attention": {}}}, {"max_context": 4096}),
        ({"sliding_window": 32, "layer_types": ["full_attention", "full_attention"]}, {"sliding_window": None}),
        ({"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}, {"sliding_window": 32}),
        ({"sliding_window": 32, "use_sliding_window": False}, {"sliding_window": None}),
        ({"model_type": "qwen2", "sliding_window": 32}, {"sliding_window": None}),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, {"sliding_window": 32}),
        ({"multi_query": True}, {"num_kv_heads": 1}),
    ],
)
def test_published_spellings(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    model_config = read_model_config(write(tmp_path, BASE | changes))
    for name, value in expected.items():
        assert getattr(model_config, name) == value, name
    for rope in ("rope_scaling", "rope_parameters"):
        assert model_config.config.get(rope) == changes.get(rope), "kept as it is"


def test_a_nested_text_config_inherits_outer_keys(tmp_path: Path) -> None:
    text = {key: value for key, value in BASE.items() if key != "architectures"} | {"dtype": None}
    outer = {
        "architectures": ["SomeVLForConditionalGeneration"],
        "text_config": text,
        "dtype": "bfloat16",
        "eos_token_id": 7,
        "vision_config": {},
    }
    model_config = read_model_config(write(tmp_path, outer))
    assert (model_config.architecture, model_config.hidden_size, model_config.dtype, model_config.eos_token_ids) == (
        "SomeVLForConditionalGeneration",
        64,
        "bfloat16",
        (7,),
    )
    assert "vision_config" not in model_config.config


@pytest.mark.parametrize(("inner", "outer", "tied"), [(False, True, True), (True, False, True), (False, False, False), (None, True, True)])
def test_either_model_may_tie_the_head(inner: bool | None, outer: bool, tied: bool, tmp_path: Path) -> None:
    """transformers reads the flag of the model that has the head; a head that is stored is used in
    any case."""
    text = BASE | ({} if inner is None else {"tie_word_embeddings": inner})
    written = {"architectures": ["SomeVLForConditionalGeneration"], "text_config": text, "tie_word_embeddings": outer}
    assert read_model_config(write(tmp_path, written)).config["tie_word_embeddings"] is tied


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    model_config = read_model_config(write(tmp_path, BASE | {"eos_token_id": 5}, {"eos_token_id": [9, 5, 11]}))
    assert model_config.eos_token_ids == (9, 5, 11)


@pytest.mark.parametrize(("generation", "expected"), [(None, (7,)), ({"eos_token_id": 9}, (9,))])
def test_the_end_token_of_a_checkpoint_that_speaks(generation: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    """Its config.json names the end of a turn beside the thinker's configuration."""
    thinker = {key: value for key, value in BASE.items() if key not in ("architectures", "eos_token_id")}
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "im_end_token_id": 7, "thinker_config": {"text_config": thinker}}
    assert read_model_config(write(tmp_path, whole, generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "holds a list, not a JSON object"),
        ({key: value for key, value in BASE.items() if key != "architectures"}, "names no architecture"),
        (BASE | {"architectures": []}, "names no architecture"),
        ({key: value for key, value in BASE.items() if key != "vocab_size"}, "has no vocab_size"),
        (BASE | {"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        (BASE | {"hidden_size": 65}, "65 is not a multiple of 4 heads"),
        (BASE | {"hidden_size": 0}, "hidden_size is 0; it must be a whole number from 1"),
        (BASE | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number from 1 to 1000"),
        (BASE | {"vocab_size": 10**400}, "it must be a whole number"),
        *((BASE | {"intermediate_size": value}, "intermediate_size is") for value in (float("nan"), 1e308, "x", [1], -1)),
        *((BASE | {"rope_scaling": {"type": "yarn", "factor": value}}, "rope_scaling.factor is") for value in ("x", float("inf"))),
        (BASE | {"rope_scaling": {"type": "yarn", "factor": -1}}, "rope_scaling.factor is -1; a number above 0"),
        (BASE | {"rope_scaling": {"type": "yarn", "factor": 1e300}}, "factor of the scaled rope"),
        (BASE | {"num_local_experts": 10**6}, "num_local_experts is 1000000; it must be a whole number from 0 to"),
        ('{"a":' + "[" * 100_000, "is not valid JSON"),
        (BASE | {"quantization_config": {"bits": 4}}, "has no quant_method"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "T5ForConditionalGeneration is an encoder-decoder model",
        ),
    ],
)
def test_invalid_files_raise_one_sentence(tmp_path: Path, config: object, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model_config(write(tmp_path, config))
    text = str(caught.value)
    assert words in text
    assert str(tmp_path) in text
    assert "\n" not in text


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="no-such' is no folder"):
        read_model_config(tmp_path / "no-such")
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model.bin' is a file; give its folder"):
        read_model_config(tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="run `frame pull org/model`"):
        read_model_config("org/model")


def test_a_gguf_file_and_its_folder_name_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    for is_there, remedy in ((True, ""), (False, f", and install the package frame-gguf: {install_command('frame-gguf')}")):
        monkeypatch.setattr("frame.host.installation.is_installed", lambda name, installed=is_there: installed)
        for place, fault in ((tmp_path / "model.gguf", "is a GGUF file"), (tmp_path, "holds a GGUF file and no config.json")):
            with pytest.raises(CheckpointError) as caught:
                read_model_config(place)
            assert fault in str(caught.value)
            assert str(caught.value).endswith(f"{remedy}.")
            assert ("frame-gguf" in str(caught.value)) != is_there
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"architectures": ["LlamaForCausalLM"]}))
    assert read_model_config(tmp_path).quantization == "gguf"
    (tmp_path / "model.safetensors").touch()
    assert read_model_config(tmp_path).quantization is None


def test_the_embedded_model_is_found_by_name() -> None:
    assert find_model(EMBEDDED).name == "frame_tiny"
    assert find_model("~/x").is_absolute()
    model_config = read_model_config(EMBEDDED)
    assert (model_config.architecture, model_config.kind) == ("DeepseekV3ForCausalLM", "mla")
    assert model_config.max_context >= 4096


def test_the_setting_of_a_draft_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^speculative.draft_model_path '.*' is no folder"):
        read_model_config(tmp_path / "missing", "speculative.draft_model_path")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"quantization": {"quant_algo": "FP8"}}', r"hf_quant_config.json: producer is None; a JSON object"),
        ('{"quantization": []}', r"hf_quant_config.json: quantization is \[\]; a JSON object"),
        ("{", "hf_quant_config.json is not valid JSON"),
    ],
)
def test_broken_descriptions_of_modelopt_are_named(content: str, sentence: str, tmp_path: Path) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    (folder / "hf_quant_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        read_model_config(folder)


def test_a_modelopt_checkpoint_with_scales_of_the_cache_alone(tmp_path: Path) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(described))
    assert read_model_config(folder).quantization is None


def test_sampling_parameters_of_generation_config(tmp_path: Path) -> None:
    """As published by Qwen: `do_sample` and unknown names do not matter."""
    stored = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 9, "eos_token_id": [1]}
    assert read_model_config(write(tmp_path, BASE, stored)).sampling == {"temperature": 0.6, "top_k": 20}
    assert read_model_config(write(tmp_path, BASE, {})).sampling == {}
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_p is '0.9'; it must be a number"):
        read_model_config(write(tmp_path, BASE, {"top_p": "0.9"}))
