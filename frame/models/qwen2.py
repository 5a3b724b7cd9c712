"""Qwen2 and Qwen2.5: Llama's shape with biased query, key and value, and a sliding window in the upper layers when asked for."""

from __future__ import annotations

from torch import nn

from frame.models.layers.attention import Attention, AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.window import layer_window


class Qwen2ForCausalLM(Decoder):
    """`layer_types` of a newer config wins over `max_window_layers`."""

    def attention(self, layer: int, prefix: str) -> nn.Module:
        options = AttentionOptions(qkv_bias=True, sliding_window=layer_window(self.model_config.config, layer))
        return Attention(self.context, self.model_config, layer, prefix, self.rotary, options)

    def mlp(self, layer: int, prefix: str) -> nn.Module:
        return GatedMLP(self.context, prefix, self.model_config.hidden_size, self.model_config.config["intermediate_size"])
