"""Llama 2 and 3, Mistral and Ministral: grouped-query attention with rotary embedding, gated
feed-forward, pre-norm."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from frame.models.layers.attention import Attention, AttentionOptions, find_layer_window
from frame.models.layers.decoder import Decoder
from frame.models.layers.mlp import GatedMLP

_WINDOWED = ("Mistral", "Ministral")


class LlamaForCausalLM(Decoder):
    """`attention_bias` and `mlp_bias` follow the config. Mistral's sliding window applies to the
    layers in `layer_types`, or to all."""

    ignored_weights: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq$",)

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        bias = bool(config.get("attention_bias", False))
        window = self.model_config.sliding_window if self.model_config.architecture.startswith(_WINDOWED) else None
        window = window and find_layer_window(self.model_config, layer)
        options = AttentionOptions(qkv_bias=bias, out_bias=bias, sliding_window=window)
        return Attention(self.context, self.model_config, layer, prefix, self.rotary, options)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        return GatedMLP(
            self.context, prefix, self.model_config.hidden_size, config["intermediate_size"], bool(config.get("mlp_bias", False))
        )
