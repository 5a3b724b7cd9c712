"""GLM-4.5, GLM-4.6 and GLM-4.5V: grouped-query attention with partly rotated heads, and
DeepSeek-V3's routing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import match_draft_layers
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import read_sigmoid_rule
from frame.models.layers.weights.fused_tensors import split_stacked_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_ROTATED = 0.5  # share of a head that rotates, unless the config says otherwise


class Glm4MoeForCausalLM(ReadsMedia):
    """The first `first_k_dense_replace` layers are dense. The multi-token-prediction layer after
    the last one is not loaded."""

    def get_ignored(self) -> tuple[str, ...]:
        return (*super().get_ignored(), match_draft_layers(self.model_config))

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        return split_stacked_experts(super().map_weights(weights))

    def build_rotary(self) -> Rotary:
        parameters = read_rope_parameters(self.model_config)
        stored = self.model_config.config.get("rope_parameters") or {}
        share = stored.get("partial_rotary_factor") or self.model_config.config.get("partial_rotary_factor") or _ROTATED
        return Rotary(self.context, int(self.model_config.head_dim * share), parameters)

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        eps = config.get("rms_norm_eps", 1e-5) if config.get("use_qk_norm", False) else None
        has_bias = config.get("attention_bias", self.model_config.architecture.startswith("Glm4v"))
        return AttentionOptions(qkv_bias=bool(has_bias), qk_norm=eps)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        if layer < config.get("first_k_dense_replace", 1):
            return super().build_mlp(layer, prefix)
        inner = config["moe_intermediate_size"]
        rule = read_sigmoid_rule(config)
        shared = GatedMLP(self.context, f"{prefix}.shared_experts", hidden, inner * config.get("n_shared_experts", 1))
        return MoE(self.context, prefix, ExpertSizes(self.model_config.num_experts, hidden, inner), rule, shared)
