"""Mixtral: Llama's attention, and experts of which the best two are renormalised."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.router import RoutingRule


class MixtralForCausalLM(Decoder):
    """The checkpoint names the MoE layer `block_sparse_moe`, and an expert's layers w1 (gate), w3
    (up) and w2 (down)."""

    mlp_name: ClassVar[str] = "block_sparse_moe"

    def get_attention_options(self, layer: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=self.model_config.sliding_window)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        sizes = ExpertSizes(config["num_local_experts"], self.model_config.hidden_size, config["intermediate_size"], ("w1", "w3", "w2"))
        return MoE(self.context, prefix, sizes, RoutingRule(config["num_experts_per_tok"], renormalize=True))
