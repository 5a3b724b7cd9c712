"""Qwen2 and Qwen2.5: Llama's layers, with biased query, key and value, and an optional sliding
window in the upper layers."""

from __future__ import annotations

from torch import nn

from frame.models.layers.attention import Attention, AttentionOptions, get_layer_window
from frame.models.layers.decoder import Decoder
from frame.models.layers.mlp import GatedMLP


class Qwen2ForCausalLM(Decoder):
    """A config's `layer_types` takes precedence over `max_window_layers`."""

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        options = AttentionOptions(qkv_bias=True, sliding_window=get_layer_window(self.model_config.config, layer))
        return Attention(self.context, self.model_config, layer, prefix, self.rotary, options)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        return GatedMLP(self.context, prefix, self.model_config.hidden_size, self.model_config.config["intermediate_size"])
