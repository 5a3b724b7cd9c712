"""Qwen3 and Qwen3-VL: no biases, RMSNorm over each head's queries and keys, explicit head
dimension."""

from __future__ import annotations

from dataclasses import replace

from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions, get_layer_window


class Qwen3ForCausalLM(ReadsMedia):
    """Biases only if the config sets `attention_bias`."""

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        plain = super().get_attention_options(layer)
        return replace(plain, qk_norm=config.get("rms_norm_eps", 1e-6), sliding_window=get_layer_window(config, layer))
