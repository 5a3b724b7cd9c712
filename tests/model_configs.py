"""Model configurations of several tests: contents of config.json, and `ModelConfig`."""

from __future__ import annotations

from typing import Any

from frame.core.interfaces.model import ModelConfig

# of a config.json
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
DENSE = {**SMALL, "intermediate_size": 128}

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=256,
    vocab_size=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    v_head_dim=64,
    kind="mha",
    latent=None,
    max_context=4096,
    dtype="bfloat16",
    config={"intermediate_size": 512},
)
