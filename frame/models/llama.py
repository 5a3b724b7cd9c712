"""Llama 2 and 3, Mistral and Ministral, and the text models of LLaVA, Mistral 3 and Voxtral:
grouped-query attention with rotary embedding, gated feed-forward, pre-norm."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions, find_layer_window

_MISTRAL = ("Mistral", "Ministral")


class LlamaForCausalLM(ReadsMedia):
    """Mistral has no biases, whatever the config says. Its sliding window applies to the layers in
    `layer_types`, or to all."""

    nested_kinds: ClassVar[tuple[str, ...]] = ("llama", "mistral", "ministral", "ministral3")
    bias_keys: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    def has_bias(self, key: str) -> bool:
        return super().has_bias(key) and not self.is_mistral

    @property
    def is_mistral(self) -> bool:
        kind = str(self.model_config.config.get("model_type"))
        return self.model_config.architecture.startswith(_MISTRAL) or kind.startswith("mistral")

    def get_attention_options(self, layer: int) -> AttentionOptions:
        window = self.model_config.sliding_window if self.is_mistral else None
        window = window and find_layer_window(self.model_config, layer)
        return replace(super().get_attention_options(layer), sliding_window=window)
