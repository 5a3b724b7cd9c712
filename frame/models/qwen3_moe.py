"""Qwen3-MoE: Qwen3's attention with normed queries and keys, and experts without a shared one."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.moe import ExpertSizes, MoE, is_moe_layer
from frame.models.layers.router import RoutingRule


class Qwen3MoeForCausalLM(Decoder):
    """Layers in `mlp_only_layers`, and those that `decoder_sparse_step` skips, are dense."""

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        window = config.get("sliding_window") if config.get("use_sliding_window", False) else None  # all layers or none
        return replace(super().get_attention_options(layer), qk_norm=config.get("rms_norm_eps", 1e-6), sliding_window=window)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        if not is_moe_layer(layer, config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()):
            return super().build_mlp(layer, prefix)
        num_experts = config.get("num_experts") or config["num_local_experts"]
        sizes = ExpertSizes(num_experts, hidden, config["moe_intermediate_size"])
        rule = RoutingRule(config["num_experts_per_tok"], renormalize=bool(config.get("norm_topk_prob", False)))
        return MoE(self.context, prefix, sizes, rule)
