"""Every architecture gives transformers' float32 logits: whole prompts, chunks, decodes, mixed
batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.plugins.loader import load_registry
from frame.testing.model.suite import mix_batches
from tests.models.harness import Session, open_session

ARCHITECTURES = [
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
]  # fmt: skip
NEWER = [
    "Olmo2ForCausalLM", "Olmo3ForCausalLM", "Phi3ForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "Glm4MoeForCausalLM",
    "GptOssForCausalLM", "MiniMaxM2ForCausalLM", "Llama4ForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM", "Gemma2ForCausalLM",
    "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM",
    "KimiLinearForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM", "FalconH1ForCausalLM",
]  # fmt: skip
FALCON_BIASES = {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "long_factor": [2.0] * 6, "short_factor": [1.0] * 6}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("LlamaForCausalLM", {"head_dim": 32, "num_key_value_heads": 1}),
    ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ("LlamaForCausalLM", {"rope_parameters": YARN}),
    ("LlamaForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 0.9, "truncate": False}}),
    ("MistralForCausalLM", {"sliding_window": 10}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    ("MixtralForCausalLM", {"sliding_window": 10}),
    ("Qwen2MoeForCausalLM", {"norm_topk_prob": True, "mlp_only_layers": [0], "qkv_bias": False}),
    ("Qwen2MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2, "decoder_sparse_step": 2}),
    ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 10}),
    ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True, "n_shared_experts": 2}),
    ("DeepseekV2ForCausalLM", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("DeepseekV3ForCausalLM", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True}),
    ("DeepseekV3ForCausalLM", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, "q_lora_rank": None}),
    ("Phi3ForCausalLM", {"sliding_window": 10, "rope_parameters": LONG, "original_max_position_embeddings": 1024}),
    ("CohereForCausalLM", {"use_qk_norm": False, "attention_bias": True, "logit_scale": 0.5, "tie_word_embeddings": True}),
    ("Glm4MoeForCausalLM", {"attention_bias": True, "use_qk_norm": False, "n_group": 4, "topk_group": 2}),
    ("Olmo3ForCausalLM", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}),
    ("Gemma2ForCausalLM", {"sliding_window": 10, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}),
    ("Gemma4ForCausalLM", {"attention_k_eq_v": True, "num_kv_shared_layers": 0, "final_logit_softcapping": 5.0, "sliding_window": 10}),
    (
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    ("Gemma3ForCausalLM", {"final_logit_softcapping": 5.0, "tie_word_embeddings": True}),
    ("FalconH1ForCausalLM", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, **FALCON_BIASES}),
    ("FalconH1ForCausalLM", {"mamba_rms_norm": True, "mamba_n_groups": 2, "tie_word_embeddings": True, "key_multiplier": 1.0}),
    ("FalconH1ForCausalLM", {"ssm_multipliers": None, "mlp_multipliers": None, "mamba_d_ssm": None, "mamba_n_heads": 8}),
    ("DeepseekV3ForCausalLM", {"rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(6, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def wanted(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def check(session: Session, model: Any) -> None:
    """Prefill, chunks, decodes and mixed batches of three requests; each token's logits against the
    reference."""
    a, b, c = prompt(45, 1), prompt(39, 2), prompt(21, 3)
    want = {0: wanted(model, a), 1: wanted(model, b), 2: wanted(model, c)}
    got: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for rows in mix_batches(a, b, c):
        for (slot, _), logits in zip(rows, session.step(rows), strict=True):
            got[slot].append(logits)
    for slot, pieces in got.items():
        torch.testing.assert_close(torch.cat(pieces), want[slot], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_transformers(architecture: str, checkpoint: Callable[..., Path], reference: Callable[[Path], Any]) -> None:
    folder = checkpoint(architecture)
    check(open_session(folder), reference(folder))


@pytest.mark.parametrize("architecture", NEWER)
def test_newer_architectures(architecture: str, checkpoint: Callable[..., Path], reference: Callable[[Path], Any]) -> None:
    folder = checkpoint(architecture)
    session = open_session(folder, attention="torch_native", page_size=4)
    check(session, reference(folder))
    records = load_registry(installed=False).records("model")
    (record,) = (found for found in records if architecture in (found.capabilities.architectures or ()))
    kinds = {cache.kind for cache in session.list_caches()}
    assert ("snapshot" in kinds) == record.capabilities.recurrent
    assert record.capabilities.windows or "window" not in kinds


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_with_the_torch_backend(
    architecture: str, page_size: int, checkpoint: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    folder = checkpoint(architecture)
    check(open_session(folder, attention="torch_native", page_size=page_size), reference(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=lambda value: str(value)[:60])
def test_variants_of_the_config(
    architecture: str, overrides: dict[str, Any], checkpoint: Callable[..., Path], reference: Callable[[Path], Any]
) -> None:
    folder = checkpoint(architecture, **overrides)
    check(open_session(folder), reference(folder))


@pytest.mark.parametrize(
    ("architecture", "overrides", "words"),
    [
        ("MixtralForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented here for experts, only silu"),
        ("Qwen3_5ForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, "is not implemented here for recurrent layers, only silu"),
        ("NemotronHForCausalLM", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not implemented here"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "with use_bidirectional_attention"),
    ],
)
def test_options_that_are_not_computed_are_refused(
    architecture: str, overrides: dict[str, Any], words: str, checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_session(checkpoint(architecture, **overrides))


def test_head_sizes_as_published_files_name_them(checkpoint: Callable[..., Path], reference: Callable[[Path], Any]) -> None:
    """transformers writes the sizes of each layer. Gemma 4's own files name those of full
    attention."""
    folder = checkpoint("Gemma4ForCausalLM", attention_k_eq_v=True)
    model, file = reference(folder), folder / "config.json"
    written = json.loads(file.read_text())
    config = {key: value for key, value in written.items() if key not in ("per_layer_config", "head_dim", "num_key_value_heads")}
    named = {"head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1}
    file.write_text(json.dumps({**config, **named}))
    session = open_session(folder)
    assert session.model_config.other_head_dims == (32,)
    check(session, model)
    file.write_text(json.dumps({**written, "num_kv_shared_layers": 4}))
    with pytest.raises(ConfigurationError, match="num_kv_shared_layers leaves no layer of kind full_attention"):
        open_session(folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_stays_near_float32(architecture: str, checkpoint: Callable[..., Path], reference: Callable[[Path], Any]) -> None:
    """Code paths that only bfloat16 takes: packed weights, all experts at once."""
    folder = checkpoint(architecture)
    tokens = prompt(60, 4)
    want = wanted(reference(folder), tokens)
    session = open_session(folder, dtype=torch.bfloat16)
    got = torch.cat([session.step([(0, tokens[:50])])[0], *(session.step([(0, [token])])[0] for token in tokens[50:])]).float()
    distance = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert distance.median() < 0.03
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.85


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "CohereForCausalLM", "Gemma3ForCausalLM"])
def test_selected_tokens_are_returned_and_the_cache_is_filled(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """Hidden states of some tokens, in the requested order, or of none; the next step finds the
    keys of all tokens."""
    folder = checkpoint(architecture)
    rows, indices = [(0, prompt(20, 8)), (1, prompt(9, 9))], torch.tensor([28, 3, 19])
    whole, narrow = open_session(folder), open_session(folder)
    batch = narrow.batch(rows, 0)
    got = [_forward(narrow, replace(batch, extensions={SelectedTokens: SelectedTokens(some)})) for some in (indices[:0], indices)]
    assert got[0].shape == (0, whole.model_config.hidden_size)
    torch.testing.assert_close(got[1], _forward(whole, whole.batch(rows, 0))[indices], atol=1e-5, rtol=1e-5)
    for session in (narrow, whole):
        session.computed = {slot: len(tokens) for slot, tokens in rows}
    for mine, want in zip(narrow.step([(0, [7]), (1, [8])]), whole.step([(0, [7]), (1, [8])]), strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def _forward(session: Session, batch: ForwardBatch) -> torch.Tensor:
    return session.model.forward(batch)


def test_folded_weights_give_the_same_logits() -> None:
    """A latent layer that decodes with folded weights, and the same layer with separate products,
    in both forms."""
    prompts = {0: [0, *prompt(40, 6)], 1: [0, *prompt(25, 7)]}
    logits = []
    for folds in (True, False):
        session = open_session(find_model(EMBEDDED), max_tokens=512, dtype=torch.bfloat16)
        for layer in session.model.layers:
            if layer.attention.folded is None:
                pytest.skip("this CPU folds nothing")
            layer.attention.folded = layer.attention.folded if folds else None
        session.step([(slot, tokens[:-4]) for slot, tokens in prompts.items()])
        logits.append(torch.cat([row for i in range(-4, 0) for row in session.step([(slot, [prompts[slot][i]]) for slot in prompts])]))
    folded, plain = (part.float() for part in logits)
    assert ((folded - plain).norm(dim=-1) / plain.norm(dim=-1)).max() < 0.03


def test_the_bundled_model(reference: Callable[[Path], Any]) -> None:
    """DeepSeek-V3 as trained, with an ignored multi-token-prediction layer."""
    folder = find_model(EMBEDDED)
    session, model = open_session(folder, max_tokens=512), reference(folder)
    tokens = [0, *prompt(300, 5)]
    got = torch.cat([session.step([(0, tokens[:200])])[0], session.step([(0, tokens[200:])])[0]])
    torch.testing.assert_close(got, wanted(model, tokens), atol=1e-4, rtol=1e-4)
