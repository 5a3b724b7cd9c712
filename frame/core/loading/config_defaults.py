"""What `config.json` files may leave to the defaults of transformers' configuration classes, by
`model_type`.

Used by `model_config`. Only keys whose default is not what a missing key means to the models here;
`tests/core/loading/test_config_defaults.py` compares them with the installed transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_EPS = {"rms_norm_eps": 1e-5}
_DEEPSEEK_V3 = {
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4,
}  # fmt: skip
_INDEXER = {"index_topk": 2048, "index_head_dim": 128}

DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cohere": {"rope_theta": 500_000.0},
        "cohere2": {"sliding_window": 4096},
        "deepseek_v2": {"n_shared_experts": 2},
        "deepseek_v3": _DEEPSEEK_V3,
        "deepseek_v32": {**_DEEPSEEK_V3, **_INDEXER, "index_n_heads": 64},
        "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 4096},
        "gemma4_text": {
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
            "sliding_window": 512,
        },
        "glm4_moe": {**_EPS, "num_experts_per_tok": 8},
        "glm_moe_dsa": {**_EPS, **_DEEPSEEK_V3, **_INDEXER, "index_n_heads": 32, "n_group": 1, "topk_group": 1},
        "gpt_oss": {**_EPS, "rope_theta": 150_000.0, "sliding_window": 128},
        "kimi_linear": {**_EPS, "num_experts_per_tok": 8, "routed_scaling_factor": 2.446},
        "llama4_text": {**_EPS, "rope_theta": 500_000.0},
        "minimax_m2": {"rope_theta": 5_000_000.0, "num_experts_per_tok": 8},
        "ministral": {"sliding_window": 4096},
        "ministral3": {**_EPS, "head_dim": 128},
        "mistral": {"sliding_window": 4096},
        "mixtral": {**_EPS, "rope_theta": 1_000_000.0, "num_experts_per_tok": 2},
        "nemotron_h": {"num_experts_per_tok": 2},
        "olmo2": _EPS,
        "olmo3": {**_EPS, "rope_theta": 500_000.0, "sliding_window": 4096},
        "phi3": _EPS,
        "qwen2_moe": {"num_experts_per_tok": 4},
        "qwen3_5_moe_text": {"num_experts_per_tok": 8},
        "qwen3_moe": {"num_experts_per_tok": 8},
        "qwen3_next": {"num_experts_per_tok": 10, "num_key_value_heads": 2, "head_dim": 256},
    }
)  # fmt: skip
