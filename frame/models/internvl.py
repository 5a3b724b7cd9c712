"""InternVL 3 and 3.5: the text models of Qwen2.5, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from frame.core.errors import ConfigurationError
from frame.models.layers.attention import AttentionOptions, get_layer_window
from frame.models.layers.decoder import Decoder
from frame.models.qwen3_moe import Qwen3MoeForCausalLM

_BIASED, _NORMED, _EXPERTS = "qwen2", "qwen3", "qwen3_moe"  # by `model_type` of the text model


class InternVLForConditionalGeneration(Qwen3MoeForCausalLM):
    """Queries, keys and values have biases (Qwen2.5), or queries and keys are normed (Qwen3)."""

    @property
    def kind(self) -> str:
        kind = str(self.model_config.config.get("model_type"))
        if kind not in (_BIASED, _NORMED, _EXPERTS):
            raise ConfigurationError(f"InternVL with a text model of model_type {kind} is not implemented here: set model.implementation.")
        return kind

    def get_attention_options(self, layer: int) -> AttentionOptions:
        if self.kind == _BIASED:
            return AttentionOptions(qkv_bias=True, sliding_window=get_layer_window(self.model_config.config, layer))
        options = super().get_attention_options(layer)
        return options if self.kind == _EXPERTS else replace(options, sliding_window=get_layer_window(self.model_config.config, layer))

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        return super().build_mlp(layer, prefix) if self.kind == _EXPERTS else Decoder.build_mlp(self, layer, prefix)
