"""Llama 2 and 3, Mistral and Ministral: grouped-query attention with rotary embedding, gated
feed-forward, pre-norm."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from frame.models.layers.attention import AttentionOptions, find_layer_window
from frame.models.layers.decoder import Decoder

_WINDOWED = ("Mistral", "Ministral")


class LlamaForCausalLM(Decoder):
    """`attention_bias` and `mlp_bias` follow the config. Mistral's sliding window applies to the
    layers in `layer_types`, or to all."""

    ignored_weights: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq$",)

    def get_attention_options(self, layer: int) -> AttentionOptions:
        window = self.model_config.sliding_window if self.model_config.architecture.startswith(_WINDOWED) else None
        window = window and find_layer_window(self.model_config, layer)
        return replace(super().get_attention_options(layer), sliding_window=window)
