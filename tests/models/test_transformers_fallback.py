"""The fallback gives transformers' own logits over the paged cache, and refuses unsupported models
with a clear message."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.errors import CheckpointError, ConfigurationError
from frame.testing.checkpoints import TINY, make_checkpoint
from tests.models.harness import open_session
from tests.models.ranks import on_ranks
from tests.models.test_logits import check, prompt, wanted
from tests.models.test_tensor_parallel import PLAN, Both
from tests.quantization.checkpoints import DIALECTS, SIZES, make_pair
from tests.quantization.test_formats import logits_of, reference_logits

SERVED = [
    ("Gemma2ForCausalLM", {"sliding_window": 10, "final_logit_softcapping": 5.0}),
    ("Gemma3ForCausalLM", {"sliding_window": 10}),
    ("Phi3ForCausalLM", {}),
    ("Olmo2ForCausalLM", {}),
    ("GPT2LMHeadModel", {}),
    ("LlamaForCausalLM", {}),
    ("Qwen3MoeForCausalLM", {}),
    ("PhimoeForCausalLM", {"sliding_window": 10}),
]


@pytest.mark.parametrize(("architecture", "overrides"), SERVED, ids=[name for name, _ in SERVED])
def test_logits(architecture: str, overrides: dict[str, Any], checkpoint: Callable[..., Path], reference: Callable[[Path], Any]) -> None:
    folder = checkpoint(architecture, **overrides)
    check(open_session(folder, model="transformers"), reference(folder))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        *((name, {}) for name in ("GraniteForCausalLM", "SeedOssForCausalLM", "Exaone4ForCausalLM", "OlmoeForCausalLM")),
        *((name, {}) for name in ("GraniteMoeForCausalLM", "PhimoeForCausalLM")),
        ("GraniteForCausalLM", {"vocab_size": 385}),
        ("GraniteForCausalLM", {"vocab_size": 385, "tie_word_embeddings": True}),
    ],
)
def test_two_ranks_by_the_plan_of_models_that_are_not_native(
    architecture: str, overrides: dict[str, Any], checkpoint: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    """Plans that split heads, that gather them for a norm, and that split stacked experts, or these
    alone; heads whose rows two ranks do not divide."""
    folder = checkpoint(architecture, **overrides)
    prompts = {slot: [token for rows in PLAN for each, tokens in rows if each == slot for token in tokens] for slot in (0, 1)}
    got: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for rows, logits in zip(PLAN, Both(folder, 2, model="transformers").run(PLAN), strict=True):
        for (slot, _), part in zip(rows, logits, strict=True):
            got[slot].append(part)
    for slot, tokens in prompts.items():
        torch.testing.assert_close(torch.cat(got[slot]), wanted(reference(folder), tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dialect", ["awq", "w8a8_fp8"])
def test_a_quantized_checkpoint_on_one_and_two_ranks(dialect: str, tmp_path: Path) -> None:
    stored, plain = make_pair("GraniteForCausalLM", dialect, tmp_path)
    want, names = reference_logits(plain), {"model": "transformers", "quantization": DIALECTS[dialect][0]["quant_method"]}
    session = open_session(stored, gemm_kernel="torch", **names)
    assert {type(part).__name__ for name, part in session.model.named_modules() if name.endswith("_proj")} == {"QuantizedLinear"}
    torch.testing.assert_close(logits_of(session), want, rtol=1e-3, atol=1e-3)
    both = on_ranks(2, lambda group: logits_of(open_session(stored, tp=group, gemm_kernel="torch", **names)))
    torch.testing.assert_close(both[0], want, rtol=1e-3, atol=1e-3)


def test_loads_follow_one_another(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces `PreTrainedModel.tie_weights` while it loads; of two loads at once, the
    second puts back the first's replacement, and the process ties no weights any more."""
    from transformers import PreTrainedModel

    load, loading, tie = PreTrainedModel.from_pretrained.__func__, [], PreTrainedModel.tie_weights

    def load_slowly(cls: type[Any], *arguments: Any, **keys: Any) -> Any:
        assert not loading
        loading.append(cls)
        time.sleep(0.2)
        try:
            return load(cls, *arguments, **keys)
        finally:
            loading.pop()

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load_slowly))
    folder = checkpoint("LlamaForCausalLM", **SIZES)
    on_ranks(2, lambda group: open_session(folder, tp=group, model="transformers"))
    assert PreTrainedModel.tie_weights is tie


def test_attention_in_both_directions_is_refused(checkpoint: Callable[..., Path]) -> None:
    """transformers makes no mask for an attention function that it does not know."""
    folder = checkpoint("Gemma2ForCausalLM", use_bidirectional_attention=True)
    with pytest.raises(ConfigurationError, match="Gemma2ForCausalLM attends in both directions"):
        open_session(folder, model="transformers")


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_weights_are_quantized_while_they_are_loaded(method: str, checkpoint: Callable[..., Path]) -> None:
    """As the native layers do."""
    folder = checkpoint("LlamaForCausalLM", **SIZES)
    names = {"quantization": method, "gemm_kernel": "torch"}
    native, ours = (logits_of(open_session(folder, model=model, **names)) for model in (None, "transformers"))
    torch.testing.assert_close(ours, native, rtol=1e-3, atol=1e-3)


def test_layers_that_are_not_quantized_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has transformer.h.0.attn.c_attn, which is a Conv1D; the fallback quantizes plain"):
        open_session(checkpoint("GPT2LMHeadModel"), model="transformers", quantization="int8")
    with pytest.raises(ConfigurationError, match=r"has model.layers.0.mlp.gate, which is a \w+; the fallback quantizes plain"):
        open_session(checkpoint("OlmoeForCausalLM"), model="transformers", quantization="int8")
    stored, _ = make_pair("GraniteForCausalLM", "awq", tmp_path)
    tensors = load_file(stored / "model.safetensors")
    save_file({name.replace("mlp.up_proj", "mlp.other"): tensor for name, tensor in tensors.items()}, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model.layers.0.mlp.up_proj.\w+: the fallback quantizes layers that it stores"):
        open_session(stored, model="transformers", quantization="awq")


def test_ranks_without_a_plan_are_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match="GPT2LMHeadModel has no plan for tensor parallelism in transformers"):
        Both(checkpoint("GPT2LMHeadModel"), 2, model="transformers").run(PLAN)


def test_a_size_that_cannot_be_split_is_refused(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("GraniteForCausalLM", intermediate_size=95)
    with pytest.raises(ConfigurationError, match="the 95 values of model.layers.0.mlp.gate_proj cannot be split into 2 equal parts"):
        Both(folder, 2, model="transformers").run(PLAN)


def test_chunked_attention_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"layer_types": ["chunked_attention", "full_attention"],', 1))
    with pytest.raises(ConfigurationError, match="attends in chunks"):
        open_session(folder, model="transformers")


def test_layers_that_select_keys_are_refused(tmp_path: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"layer_types": ["full_attention", "minimax_m3_sparse"],', 1))
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has layers of kind minimax_m3_sparse"):
        open_session(folder, model="transformers")
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: torch.zeros(1, 1, 2, 2))
    with pytest.raises(ConfigurationError, match="LlamaAttention masks keys by itself"):
        open_session(checkpoint("LlamaForCausalLM"), model="transformers")


@pytest.mark.parametrize("options", [{}, {"keep_window_size": 2}])
def test_masks_that_are_passed_by_name_are_refused(
    options: dict[str, Any], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doge adds a bias of keys to its mask, and passes it by name."""
    monkeypatch.setattr("frame.testing.checkpoints.TINY", {**TINY, "DogeForCausalLM": ("doge", {})})
    with pytest.raises(ConfigurationError, match="DogeAttention masks keys by itself"):
        open_session(checkpoint("DogeForCausalLM", **options), model="transformers")


def test_dummy_weights(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("Phi3ForCausalLM")
    logits = [open_session(folder, model="transformers", load_format="dummy").step([(0, prompt(20))])[0] for _ in range(2)]
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("StableLmForCausalLM", "does not compute attention through"),
        ("DeepseekV3ForCausalLM", "uses latent attention"),
        ("Qwen3_5ForCausalLM", "keeps a recurrent state"),
    ],
)
def test_refused(architecture: str, words: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_session(checkpoint(architecture), model="transformers")


def test_unknown_architecture(tmp_path: Path) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "ZebraForCausalLM"))
    with pytest.raises(ConfigurationError, match="ZebraForCausalLM is neither implemented here nor known to transformers"):
        open_session(folder, model="transformers")


def test_backend_without_a_used_feature_is_refused(checkpoint: Callable[..., Path]) -> None:
    from dataclasses import replace

    from tests.models.harness import NaiveAttention

    class NoCap(NaiveAttention):
        capabilities = replace(NaiveAttention.capabilities, soft_cap=False)

    with pytest.raises(ConfigurationError, match="Gemma2ForCausalLM uses a soft cap"):
        open_session(checkpoint("Gemma2ForCausalLM"), model="transformers", attention=NoCap)


def test_missing_and_unexpected_weights(tmp_path: Path) -> None:
    folder = make_checkpoint("Phi3ForCausalLM", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    kept = tensors.pop("model.layers.0.mlp.down_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model.layers.0.mlp.down_proj.weight \(1 parameters"):
        open_session(folder, model="transformers")
    tensors |= {"model.layers.0.mlp.down_proj.weight": kept, "other": torch.zeros(1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="holds other, which"):
        open_session(folder, model="transformers")
