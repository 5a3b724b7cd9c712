"""What `config.json` files may leave to the defaults of transformers' configuration classes, by
`model_type`.

Used by `model_config`. Only keys whose default is not what a missing key means to the models here.
`tests/models/test_missing_keys.py` finds them for every native architecture by building its model
without each key; `tests/checkpoint/test_config_defaults.py` compares the values with the
installed transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_size")
CONTEXT = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx", "model_max_length",
    "max_target_positions",
)  # fmt: skip
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
# Keys with one meaning: one of them in config.json is enough.
_SYNONYMS = (
    KV_HEADS, HEAD_DIM, CONTEXT, EXPERTS, ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    ("rope_parameters", "rope_scaling"), ("n_groups", "mamba_n_groups"), ("linear_head_dim", "linear_attn_config"),
    ("linear_num_heads", "linear_attn_config"),
)  # fmt: skip

_EPS = {"rms_norm_eps": 1e-05}
_LLAMA_SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
# Sizes that the nested configuration of a language model with encoders leaves out where they have
# the default (LLaVA); a model of its own names them.
NESTED_SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama": _LLAMA_SIZES,
        "mistral": {**_LLAMA_SIZES, "intermediate_size": 14336, "num_key_value_heads": 8},
        "qwen2": {**_LLAMA_SIZES, "intermediate_size": 22016, "num_key_value_heads": 32},
        "qwen3": {**_LLAMA_SIZES, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128},
    }
)
_DEEPSEEK_V3 = {
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4, "n_routed_experts": 256, "moe_intermediate_size": 2048,
}  # fmt: skip
_INDEXER = {"index_topk": 2048, "index_head_dim": 128}
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DELTA = {"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "rope_type": "yarn"}

_QWEN2_VL = {**_EPS, "rope_theta": 1000000.0, "max_position_embeddings": 32768, "num_key_value_heads": 8}
_QWEN3_VL = {"rope_theta": 500000.0, "max_position_embeddings": 128000, "head_dim": 128}
# Pairs of a head that each component of a position turns (M-RoPE), where `rope_parameters` does not
# say, and whether the components alternate, which transformers takes from no key
SECTIONS: Mapping[str, tuple[tuple[int, int, int], bool]] = MappingProxyType(
    {
        **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), ((16, 24, 24), False)),
        **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), ((24, 20, 20), True)),
        **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ((11, 11, 10), True)),
        **dict.fromkeys(("glm4v_text", "glm4v_moe_text"), ((8, 12, 12), False)),
    }
)

DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cohere": {"rope_theta": 500000.0, "max_position_embeddings": 8192},
        "cohere2": {"sliding_window": 4096, "max_position_embeddings": 8192},
        "deepseek_v2": {**_MLA, "n_shared_experts": 2, "moe_intermediate_size": 1407, "n_routed_experts": 64},
        "deepseek_v3": {**_DEEPSEEK_V3, **_MLA, "max_position_embeddings": 4096},
        "deepseek_v32": {**_DEEPSEEK_V3, **_INDEXER, **_MLA, "index_n_heads": 64, "max_position_embeddings": 163840},
        "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 8192},
        "gemma3_text": {
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 4096,
            "max_position_embeddings": 131072,
        },
        "gemma4_text": {
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
            "sliding_window": 512, "max_position_embeddings": 131072, "vocab_size_per_layer_input": 262144,
        },
        "glm4_moe": {
            **_EPS, "num_experts_per_tok": 8, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_routed_experts": 128,
            "num_key_value_heads": 8,
        },
        "glm4v_text": {**_EPS, "num_key_value_heads": 2, "max_position_embeddings": 32768},
        "glm4v_moe_text": {
            **_EPS, "num_experts_per_tok": 8, "max_position_embeddings": 65536, "moe_intermediate_size": 1408, "n_routed_experts": 128,
            "num_key_value_heads": 8,
        },
        "glm_moe_dsa": {
            **_EPS, **_DEEPSEEK_V3, **_INDEXER, **_MLA, "n_group": 1, "topk_group": 1, "index_n_heads": 32,
            "max_position_embeddings": 202752, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
        },
        "gpt_oss": {
            **_EPS, "rope_theta": 150000.0, "sliding_window": 128, "head_dim": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8,
            "num_local_experts": 128,
            "rope_parameters": {**_YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},  # base: above
        },
        "kimi_linear": {
            **_EPS, "num_experts_per_tok": 8, "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "linear_head_dim": 128,
            "linear_num_heads": 32, "model_max_length": 1048576, "moe_intermediate_size": 1024, "num_experts": 256,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        "llama4_text": {
            **_EPS, "rope_theta": 500000.0, "attention_chunk_size": 8192, "head_dim": 128, "intermediate_size_mlp": 16384,
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_local_experts": 16,
        },
        "minimax_m2": {
            "rope_theta": 5000000.0, "num_experts_per_tok": 8, "head_dim": 128, "max_position_embeddings": 196608,
            "num_key_value_heads": 8, "num_local_experts": 256,
        },
        "ministral": {"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8},
        "ministral3": {
            **_EPS, "head_dim": 128, "max_position_embeddings": 262144, "num_key_value_heads": 8,
            "rope_parameters": {
                **_YARN, "factor": 16.0, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 262144, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "type": "yarn",
            },
        },
        "mistral": {"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8},
        "mixtral": {
            **_EPS, "rope_theta": 1000000.0, "num_experts_per_tok": 2, "max_position_embeddings": 131072, "num_key_value_heads": 8,
            "num_local_experts": 8,
        },
        "nemotron_h": {
            "num_experts_per_tok": 2, "head_dim": 128, "mamba_head_dim": 64, "mamba_num_heads": 128, "max_position_embeddings": 4096,
            "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "n_groups": 8, "n_routed_experts": 8,
            "num_key_value_heads": 8, "ssm_state_size": 128,
        },
        "olmo2": _EPS,
        "olmo3": {**_EPS, "rope_theta": 500000.0, "sliding_window": 4096},
        "phi3": {**_EPS, "max_position_embeddings": 4096},
        "qwen2_moe": {
            "num_experts_per_tok": 4, "max_position_embeddings": 32768, "moe_intermediate_size": 1408, "num_experts": 60,
            "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632,
        },
        "qwen3_5_moe_text": {
            **_DELTA, "num_experts_per_tok": 8, "head_dim": 256, "max_position_embeddings": 32768, "moe_intermediate_size": 512,
            "num_experts": 256, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512,
        },
        "qwen3_moe": {
            "num_experts_per_tok": 8, "max_position_embeddings": 32768, "moe_intermediate_size": 768, "num_local_experts": 128,
            "num_key_value_heads": 4,
        },
        "qwen3_next": {
            **_DELTA, "num_experts_per_tok": 10, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
            "moe_intermediate_size": 512, "num_experts": 512, "shared_expert_intermediate_size": 512,
        },
        "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
        "qwen3": {"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32},
        "falcon_h1": {
            **_EPS, "mamba_d_head": 8, "mamba_d_ssm": 1024, "mamba_d_state": 256, "mamba_n_heads": 128, "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
        },
        "qwen3_5_text": {**_DELTA, "head_dim": 256, "max_position_embeddings": 32768, "num_key_value_heads": 4},
        "qwen2_vl_text": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen3_vl_text": {**_QWEN3_VL, "num_key_value_heads": 32},
        "qwen3_vl_moe_text": {
            **_QWEN3_VL, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "num_experts": 60, "num_key_value_heads": 16,
        },
        "qwen3_omni_moe_text": {
            "rope_theta": 1000000.0, "max_position_embeddings": 32768, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "num_experts": 128, "num_key_value_heads": 4,
        },
        "bert": {"max_position_embeddings": 512},
        "roberta": {"max_position_embeddings": 512},
        "xlm-roberta": {"max_position_embeddings": 512},
    }
)  # fmt: skip


def add_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the defaults of its `model_type` for keys that it lacks under every
    name, and with one entry for the rotary settings."""
    complete = _join_rope(dict(config))
    for key, value in DEFAULTS.get(str(config.get("model_type")), {}).items():
        names = next((group for group in _SYNONYMS if key in group), ())
        if key not in config and all(config.get(name) is None for name in names):
            complete[key] = value
    return _add_sections(complete)


def _join_rope(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, which users add to a file that transformers 5 saved with `rope_parameters`,
    replaces those as in transformers (`convert_rope_params_to_dict`), or those of full attention.
    A base that it lacks, and no other key has, stays."""
    scaling, stored = config.get("rope_scaling"), config.get("rope_parameters")
    if not (isinstance(scaling, Mapping) and scaling and isinstance(stored, Mapping) and stored):
        return config
    del config["rope_scaling"]
    if any(isinstance(value, Mapping) for value in stored.values()):  # one entry for each kind of layer
        joined = {**stored, "full_attention": {**(stored.get("full_attention") or {}), **scaling}}
    else:
        kept = ("rope_theta",) if "rope_theta" in stored and config.get("rope_theta") is None else ()
        joined = {**{key: stored[key] for key in kept}, **scaling}
    return {**config, "rope_parameters": joined}


def _add_sections(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the sections of its `model_type`, where they fill its heads."""
    sections, alternates = SECTIONS.get(str(config.get("model_type")), ((), False))
    key = "rope_parameters" if config.get("rope_parameters") or not config.get("rope_scaling") else "rope_scaling"
    stored = config.get(key) or {}
    if not sections or not isinstance(stored, Mapping) or any(isinstance(value, Mapping) for value in stored.values()):
        return config
    width = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    share = stored.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if "mrope_section" not in stored and 2 * sum(sections) == int(width * share):
        stored = {**stored, "mrope_section": list(sections)}
    if alternates and "mrope_section" in stored:
        stored = {**stored, "mrope_interleaved": True}
    return {**config, key: stored} if stored else config
