"""The bundled model's files: size, tokenizer, chat template, and agreement with transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from frame.entrypoints.tools.eval.tasks import make_examples

DIRECTORY = Path(__file__).parents[3] / "frame/models/frame_tiny"
TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import DeepseekV3ForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    return DeepseekV3ForCausalLM.from_pretrained(DIRECTORY, local_files_only=True, dtype=torch.float32).eval()


def test_size_and_layout() -> None:
    path = DIRECTORY / "model.safetensors"
    assert path.stat().st_size <= 16_000_000
    config = json.loads((DIRECTORY / "config.json").read_text())
    layers = config["num_hidden_layers"]
    with safe_open(path, "pt") as weights:
        names = set(weights.keys())
        types = {name: weights.get_slice(name).get_dtype() for name in names}
    extra = f"model.layers.{layers}."
    assert {f"{extra}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= names
    assert f"{extra}embed_tokens.weight" not in names
    assert f"{extra}shared_head.head.weight" not in names
    assert config["num_nextn_predict_layers"] == 1
    assert {name for name, kind in types.items() if kind != "BF16"} == {name for name in names if name.endswith("correction_bias")}


def test_sizes_fit_kernels_and_tensor_parallelism() -> None:
    config = json.loads((DIRECTORY / "config.json").read_text())
    assert config["max_position_embeddings"] >= 4096
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "vocab_size")
    assert all(config[name] % 32 == 0 for name in (*sizes, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    assert config["num_attention_heads"] % 2 == 0


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    if any(mark in text for mark in SPECIAL):
        return
    ids = TOKENIZER.encode(text).ids
    assert ids[0] == 0
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


@given(st.lists(st.text(alphabet="abc 012\n=,é漢", max_size=12), max_size=6))
@settings(max_examples=100, deadline=None)
def test_decoded_text_grows_without_revision(parts: list[str]) -> None:
    """Text decoded from a prefix of the ids is a prefix of the whole text, except for bytes of an
    unfinished character."""
    ids = TOKENIZER.encode("".join(parts), add_special_tokens=False).ids
    whole = TOKENIZER.decode(ids)
    for end in range(len(ids)):
        assert whole.startswith(TOKENIZER.decode(ids[:end]).rstrip("\ufffd"))


def test_tokenizer_rules(tokenizer: Any) -> None:
    assert tokenizer.is_fast
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("x=1234", add_special_tokens=False).input_ids)[-4:] == list("1234")
    inside = tokenizer('"kavomi"', add_special_tokens=False).input_ids[1:-1]
    assert inside == tokenizer("kavomi", add_special_tokens=False).input_ids
    assert tokenizer("abc").input_ids == TOKENIZER.encode("abc").ids


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be {{ brief }}."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "x\n"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be {{ brief }}.<|user|>1 + 1?<|assistant|>2<|eos|><|user|>x\n<|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert (ids[0], ids[1], ids[-1]) == (0, 3, 5)
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": ""}], tokenize=False)


@torch.no_grad()
def reply(model: Any, tokenizer: Any, messages: Any, max_tokens: int) -> str:
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "reverse", "sort", "sum"])
def test_transformers_solves_the_tasks(model: Any, tokenizer: Any, task: str) -> None:
    examples = make_examples(task, 6, seed=11)
    replies = [reply(model, tokenizer, example.messages, example.max_tokens) for example in examples]
    assert sum(a == example.expected for a, example in zip(replies, examples, strict=True)) >= 4


def test_transformers_recalls(model: Any, tokenizer: Any) -> None:
    for example in [each for each in make_examples("recall", 20, seed=11) if each.context_tokens < 1200][:5]:
        assert reply(model, tokenizer, example.messages, example.max_tokens) == example.expected


def test_training_model_agrees_with_transformers(model: Any) -> None:
    from scripts.train_frame_tiny.export import load_model

    ids = torch.randint(0, 2048, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = load_model(DIRECTORY).logits(ids), model(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)
