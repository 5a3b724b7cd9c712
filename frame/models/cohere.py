"""Cohere Command R (cohere) and Command R7B, Command A (cohere2): LayerNorm without bias, attention
and feed-forward in parallel, interleaved rotary embedding, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from frame.models.layers.attention import AttentionOptions, find_layer_window
from frame.models.layers.decoder import Decoder, ParallelLayer
from frame.models.layers.norm import LayerNorm
from frame.models.layers.rotary import Rotary, read_rope_parameters

_DEFAULT_SCALE = 0.0625  # of the logits
_DEFAULT_PATTERN = 4  # every fourth layer of cohere2 has full attention


class CohereForCausalLM(Decoder):
    """Embeddings are tied unless the config says otherwise. In cohere2 only the layers with a
    sliding window rotate queries and keys."""

    ties_by_default: ClassVar[bool] = True

    def build_norm(self, name: str) -> LayerNorm:
        eps = self.model_config.config.get("layer_norm_eps", 1e-5)
        return LayerNorm(self.context, name, self.model_config.hidden_size, eps, bias=False)

    def build_rotary(self) -> Rotary:
        return Rotary(self.context, self.model_config.head_dim, read_rope_parameters(self.model_config), interleaved=True)

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        norm = self.build_norm(f"{prefix}.input_layernorm")
        return ParallelLayer(norm, self.build_attention(index, f"{prefix}.self_attn"), self.build_mlp(index, f"{prefix}.mlp"))

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        eps = config.get("layer_norm_eps", 1e-5) if config.get("use_qk_norm", False) else None
        window, rotates = None, True
        if self.model_config.architecture.startswith("Cohere2"):
            window = find_layer_window(self.model_config, layer, config.get("sliding_window_pattern", _DEFAULT_PATTERN))
            rotates = window is not None
        plain = super().get_attention_options(layer)
        return replace(plain, qk_norm=eps, qk_norm_kind="layer", sliding_window=window, rotates=rotates)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) * self.model_config.config.get("logit_scale", _DEFAULT_SCALE)
