"""Odd configurations: options of config.json that published checkpoints have seldom, or that
transformers reads in another way than their names say.

`benchmarks/odd_configurations.py` and `test_odd_configurations.py` run each of them beside
transformers. Must not know how frame loads or runs a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from frame.testing.checkpoints import make_checkpoint

DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8, "beta_slow": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 3.0, "original_max_position_embeddings": 1024}
BIASED = {"attention_bias": True, "mlp_bias": True}


def by_kind(full: Mapping[str, Any], sliding: Mapping[str, Any] = DEFAULT) -> dict[str, Any]:
    return {"full_attention": dict(full), "sliding_attention": dict(sliding)}


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    return {**LONG, "long_factor": [1.0 + 0.5 * i for i in range(pairs)], "short_factor": [1.0 + 0.1 * i for i in range(pairs)], **more}


@dataclass(frozen=True)
class OddConfiguration:
    """`head` of a tied configuration: what the checkpoint stores besides the embedding: nothing,
    another matrix, an equal one, or the matrix under the head's name alone."""

    architecture: str
    overrides: Mapping[str, Any]
    head: Literal["", "other", "equal", "alone"] = ""
    written: Mapping[str, Any] = field(default_factory=dict)  # put into config.json afterwards; None: removed

    def __str__(self) -> str:
        options = json.dumps({**self.overrides, **self.written}, sort_keys=True)
        return f"{self.architecture} {options}{f' head: {self.head}' if self.head else ''}"

    def make(self, folder: Path) -> Path:
        """Write the checkpoint."""
        make_checkpoint(self.architecture, folder, **self.overrides)
        if self.written:
            file = folder / "config.json"
            config = json.loads(file.read_text()) | self.written
            file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        if self.head:
            store_head(folder, self.head)
        return folder


def store_head(folder: Path, head: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "backbone.embeddings.weight")))
    matrix = tensors.pop(name) if head == "alone" else tensors[name]
    tensors["lm_head.weight"] = matrix.flip(0).contiguous() if head == "other" else matrix.clone()
    save_file(tensors, file, metadata={"format": "pt"})


TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}


def odd(architecture: str, head: Any = "", written: Mapping[str, Any] | None = None, **overrides: Any) -> OddConfiguration:
    return OddConfiguration(f"{architecture}ForCausalLM", overrides, head, written or {})


ODD = (
    # heads that are stored and tied, and vocabularies that two ranks do not divide
    odd("Llama", "other", **TIED, vocab_size=383),
    odd("Llama", "equal", **TIED, vocab_size=389, num_key_value_heads=1),
    odd("Llama", "alone", **TIED, rms_norm_eps=1e-2),
    odd("Qwen2", "other", **TIED, vocab_size=387, num_key_value_heads=4),
    odd("Qwen3", "other", **TIED, head_dim=20, attention_bias=True),
    odd("Mixtral", "other", **TIED, num_experts_per_tok=1, num_key_value_heads=1),
    odd("DeepseekV3", "other", **TIED, first_k_dense_replace=0, vocab_size=391),
    odd("Cohere", "other", **TIED, logit_scale=3.0, layer_norm_eps=1e-2),
    odd("Gemma2", "other", **TIED, query_pre_attn_scalar=7, sliding_window=5),
    odd("Gemma3", "equal", **TIED, head_dim=20),
    odd("Gemma4", "other", **TIED, num_kv_shared_layers=0),
    odd("KimiLinear", "other", **TIED, mlp_bias=True),
    odd("NemotronH", "other", **TIED, **BIASED, use_bias=True),
    odd("Cohere2", **UNTIED, sliding_window=3, num_key_value_heads=1),
    odd("Gemma3", **UNTIED, sliding_window=1, layer_types=["full_attention", "sliding_attention"]),
    # biases that an architecture has not, whatever the flags say
    odd("Mistral", **BIASED, sliding_window=7),
    odd("Ministral", **BIASED, layer_types=["sliding_attention", "sliding_attention"], sliding_window=9),
    odd("Ministral3", **BIASED, head_dim=20),
    odd("Mixtral", **BIASED, sliding_window=6),
    odd("Qwen2", **BIASED, qkv_bias=False, num_attention_heads=8),
    odd("Qwen2Moe", **BIASED, qkv_bias=False, decoder_sparse_step=2, num_key_value_heads=1),
    odd("Qwen3Moe", **BIASED, mlp_only_layers=[1], head_dim=40),
    odd("DeepseekV2", **BIASED, n_shared_experts=2),
    odd("DeepseekV3", **BIASED, q_lora_rank=None, n_shared_experts=0),
    odd("Olmo2", **BIASED, sliding_window=5, num_key_value_heads=1),
    odd("Phi3", **BIASED, num_key_value_heads=1, sliding_window=11, layer_types=["full_attention", "sliding_attention"]),
    odd("GptOss", attention_bias=False, num_key_value_heads=1, sliding_window=2),
    odd("MiniMaxM2", **BIASED, head_dim=40, num_experts_per_tok=3),
    odd("Glm4Moe", **BIASED, use_qk_norm=False, n_shared_experts=2),
    odd("NemotronH", attention_bias=True, use_conv_bias=False, n_groups=4, num_key_value_heads=1),
    # rotary embeddings, also of parts of a head and by kind of layer
    odd("Llama", rope_parameters={**YARN, "truncate": False, "attention_factor": 1.3}, head_dim=40),
    odd("Llama", rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5}),
    odd("Llama", rope_parameters=longrope(8), max_position_embeddings=512, written={"original_max_position_embeddings": 1024}),
    odd("Mistral", rope_parameters={**LLAMA3, "low_freq_factor": 0.5}, sliding_window=5, num_key_value_heads=1),
    odd("Qwen2", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}, vocab_size=381),
    odd("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0),
    odd("Qwen3", rope_parameters=LINEAR, head_dim=6, num_attention_heads=6, num_key_value_heads=3),
    odd("Qwen3", written={"rope_parameters": None, "rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    odd("Llama", written={"rope_parameters": None, "rope_theta": 3e5, "rope_scaling": LLAMA3}, num_hidden_layers=5),
    odd("Phi3", rope_parameters=longrope(6, partial_rotary_factor=0.75), original_max_position_embeddings=16),
    odd("Phi3", rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5}, num_key_value_heads=4, num_hidden_layers=1),
    odd("Glm4Moe", rope_parameters={**YARN, "partial_rotary_factor": 0.25}, first_k_dense_replace=2),
    odd("Glm4Moe", rope_parameters={**LINEAR, "partial_rotary_factor": 0.5}, head_dim=6),
    odd("MiniMaxM2", rope_parameters={**LLAMA3, "partial_rotary_factor": 0.5}),
    odd("Qwen3Next", rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5}, norm_topk_prob=False, linear_conv_kernel_dim=2),
    odd("Qwen3_5", rope_parameters={**DEFAULT, "partial_rotary_factor": 0.25}, head_dim=20, num_key_value_heads=1),
    odd("Gemma3", rope_parameters=by_kind(LINEAR, {**DEFAULT, "rope_theta": 50.0}), sliding_window=4, final_logit_softcapping=2.0),
    odd("Gemma4", final_logit_softcapping=2.0, num_hidden_layers=5, hidden_size_per_layer_input=4, sliding_window=3),
    odd("Olmo3", rope_parameters=by_kind(YARN), sliding_window=3, num_key_value_heads=1, rms_norm_eps=1e-2),
    odd("GptOss", rope_parameters={**YARN, "truncate": False}, layer_types=["full_attention", "full_attention"]),
    odd("DeepseekV2", rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.4}, topk_method="greedy", routed_scaling_factor=0.3),
    odd("DeepseekV3", rope_parameters=LLAMA3, rope_interleave=False, v_head_dim=24, n_group=2, topk_group=1),
    odd("DeepseekV32", index_topk=4, rope_parameters=LINEAR, first_k_dense_replace=2),
    odd("DeepseekV32", mlp_layer_types=["sparse", "dense"], first_k_dense_replace=3),
    odd("GlmMoeDsa", mlp_layer_types=["dense", "sparse", "dense"], first_k_dense_replace=0),
    odd("Cohere", rope_parameters=LINEAR, use_qk_norm=False, attention_bias=True, num_key_value_heads=4),
    # windows, chunks and experts
    odd("Llama4", attention_chunk_size=5, no_rope_layers=[1, 1], moe_layers=[0, 1]),
    odd("Llama4", attention_chunk_size=None, use_qk_norm=False, attn_temperature_tuning=False, moe_layers=[]),
    odd("Qwen3Moe", norm_topk_prob=False, num_experts_per_tok=3, use_sliding_window=True, sliding_window=2),
    odd("Qwen2Moe", use_sliding_window=True, sliding_window=4, layer_types=["full_attention", "sliding_attention"], norm_topk_prob=True),
    odd("Qwen3_5Moe", num_experts_per_tok=3, full_attention_interval=1, num_key_value_heads=1, **TIED),
    odd("KimiLinear", mlp_layer_types=["sparse", "sparse"], linear_conv_kernel_dim=2, routed_scaling_factor=0.7, moe_renormalize=False),
    odd("NemotronH", layers_block_type=["full_attention", "linear_attention", "mlp", "moe"], norm_topk_prob=False, ssm_state_size=16),
    odd("GlmMoeDsa", index_topk=3, indexer_types=["full", "full", "shared"], n_group=2, topk_group=2),
    odd("Exaone4", sliding_window=5, num_key_value_heads=1),
    odd("Granite", logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=4.0, **TIED),
)  # fmt: skip
