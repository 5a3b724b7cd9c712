"""Qwen2-MoE and Qwen1.5-MoE: biased attention, experts, and a gated shared expert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.moe import ExpertSizes, GatedSharedExpert, MoE, is_moe_layer
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.fused_tensors import split_stacked_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor


class Qwen2MoeForCausalLM(Decoder):
    """Layers in `mlp_only_layers`, and those that `decoder_sparse_step` skips, are dense."""

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        return split_stacked_experts(super().map_weights(weights))

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        window = None
        if config.get("use_sliding_window", False) and config.get("sliding_window"):
            kinds = config.get("layer_types")
            slides = kinds[layer] == "sliding_attention" if kinds else layer % 2 == 0 and layer < config.get("max_window_layers", 28)
            window = int(config["sliding_window"]) if slides else None
        return AttentionOptions(qkv_bias=bool(config.get("qkv_bias", True)), sliding_window=window)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        if not is_moe_layer(layer, config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()):
            return super().build_mlp(layer, prefix)
        sizes = ExpertSizes(config["num_experts"], hidden, config["moe_intermediate_size"])
        rule = RoutingRule(config["num_experts_per_tok"], renormalize=bool(config.get("norm_topk_prob", False)))
        shared_size = config["shared_expert_intermediate_size"]
        shared = GatedSharedExpert(self.context, f"{prefix}.shared_expert", f"{prefix}.shared_expert_gate", hidden, shared_size)
        return MoE(self.context, prefix, sizes, rule, shared)
