"""Qwen3: no biases, RMSNorm over each head's queries and keys, explicit head dimension."""

from __future__ import annotations

from torch import nn

from frame.models.layers.attention import Attention, AttentionOptions, get_layer_window
from frame.models.layers.decoder import Decoder
from frame.models.layers.mlp import GatedMLP


class Qwen3ForCausalLM(Decoder):
    """Biases only if the config sets `attention_bias`."""

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        bias = bool(config.get("attention_bias", False))
        options = AttentionOptions(
            qkv_bias=bias, out_bias=bias, qk_norm=config.get("rms_norm_eps", 1e-6), sliding_window=get_layer_window(config, layer)
        )
        return Attention(self.context, self.model_config, layer, prefix, self.rotary, options)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        return GatedMLP(self.context, prefix, self.model_config.hidden_size, self.model_config.config["intermediate_size"])
