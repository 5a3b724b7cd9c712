"""Gemma 2 and Gemma 3: norms before and after attention and feed-forward, and alternating
sliding windows.

Gemma 2 caps the scores; Gemma 3 norms queries and keys and has two rotary bases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.kernels.linear.invariant import map_elements
from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions, find_layer_window
from frame.models.layers.decoder import NormedOutputLayer
from frame.models.layers.mlp import GatedMLP, read_activation
from frame.models.layers.norm import RMSNorm
from frame.models.layers.rotary import Rotary, read_rope_parameters

_OFFSET = 1.0  # the checkpoints store the weights of norms minus one
_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}  # of Gemma 3, unless the config says otherwise


class Gemma3ForCausalLM(ReadsMedia):
    """Every second layer of Gemma 2 and every sixth of Gemma 3 has full attention, unless the
    config lists the layers."""

    ties_by_default: ClassVar[bool] = True

    @property
    def is_gemma2(self) -> bool:
        return self.model_config.architecture.startswith("Gemma2")

    def build_norm(self, name: str) -> RMSNorm:
        eps = self.model_config.config.get("rms_norm_eps", 1e-6)
        return RMSNorm(self.context, name, self.model_config.hidden_size, eps, _OFFSET)

    def build_rotary(self) -> Rotary:
        if self.model_config.config.get("use_bidirectional_attention") is True:
            name = self.model_config.architecture
            raise ConfigurationError(f"{name} with use_bidirectional_attention (an encoder) is not implemented here.")
        head_dim = self.model_config.head_dim
        if self.is_gemma2:
            self.sliding_rotary = None
            return Rotary(self.context, head_dim, read_rope_parameters(self.model_config))
        self.sliding_rotary = Rotary(self.context, head_dim, self._rope("sliding_attention", "rope_local_base_freq"))
        return Rotary(self.context, head_dim, self._rope("full_attention", "rope_theta"))

    def get_rotary(self, layer: int) -> Rotary:
        return self.sliding_rotary if self.sliding_rotary is not None and self._window(layer) else self.rotary

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        names = ("post_attention_layernorm", "post_feedforward_layernorm", "input_layernorm", "pre_feedforward_layernorm")
        norms = [self.build_norm(f"{prefix}.{name}") for name in names]
        attention, mlp = self.build_attention(index, f"{prefix}.self_attn"), self.build_mlp(index, f"{prefix}.mlp")
        return NormedOutputLayer(attention, mlp, (norms[0], norms[1]), (norms[2], norms[3]))

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        return replace(
            super().get_attention_options(layer),
            qk_norm=None if self.is_gemma2 else config.get("rms_norm_eps", 1e-6),
            norm_offset=_OFFSET,
            sliding_window=self._window(layer),
            scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=config.get("attn_logit_softcapping", 50.0) if self.is_gemma2 else None,
        )

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
        return GatedMLP(self.context, prefix, self.model_config.hidden_size, config["intermediate_size"], activation=activation)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().embed(token_ids)
        scale = torch.tensor(self.model_config.hidden_size**0.5, dtype=embedded.dtype)  # rounded, as in training
        return embedded * scale.item()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        cap = self.model_config.config.get("final_logit_softcapping", 30.0 if self.is_gemma2 else None)
        if not cap or self.model_config.architecture == "Gemma3ForConditionalGeneration":  # where transformers has no cap
            return logits
        return (map_elements(torch.tanh, logits / cap) if self.context.deterministic else torch.tanh(logits / cap)) * cap

    def _window(self, layer: int) -> int | None:
        pattern = 2 if self.is_gemma2 else self.model_config.config.get("sliding_window_pattern", 6)
        return find_layer_window(self.model_config, layer, pattern)

    def _rope(self, kind: str, theta_key: str) -> dict[str, object]:
        parameters = read_rope_parameters(self.model_config, kind, theta_key)
        config = self.model_config.config
        stored = (config.get("rope_parameters") or {}).get(kind) or {}
        if "rope_theta" not in stored and theta_key not in config:
            parameters["rope_theta"] = _THETA[kind]
        return parameters
