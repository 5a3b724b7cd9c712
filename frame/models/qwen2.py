"""Qwen2 and Qwen2.5: Llama's layers, with biased query, key and value, and an optional sliding
window in the upper layers."""

from __future__ import annotations

from frame.models.layers.attention import AttentionOptions, get_layer_window
from frame.models.layers.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """A config's `layer_types` takes precedence over `max_window_layers`."""

    def get_attention_options(self, layer: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=True, sliding_window=get_layer_window(self.model_config.config, layer))
