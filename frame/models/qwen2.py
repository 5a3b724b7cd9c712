"""Qwen2 and Qwen2.5, and the text models of Qwen2-VL, Qwen2.5-VL, LLaVA-OneVision and Qwen2-Audio:
Llama's layers, with biased query, key and value, and an optional sliding window in the upper
layers."""

from __future__ import annotations

from typing import ClassVar

from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions, get_layer_window


class Qwen2ForCausalLM(ReadsMedia):
    """A config's `layer_types` takes precedence over `max_window_layers`."""

    nested_kinds: ClassVar[tuple[str, ...]] = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl", "seed_oss")

    def get_attention_options(self, layer: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=True, sliding_window=get_layer_window(self.model_config.config, layer))
