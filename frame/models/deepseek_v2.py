"""DeepSeek-V2 (arXiv 2405.04434): latent attention, softmax routing (group-limited in the large
model), shared experts, YaRN."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from frame.models.layers.decoder import Decoder
from frame.models.layers.mla import LatentAttention
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.rotary import Rotary, compute_yarn_scale, read_rope_parameters
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.fused_tensors import split_stacked_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor


class DeepseekV2ForCausalLM(Decoder):
    """The first `first_k_dense_replace` layers are dense (`is_dense`). V3 differs in its routing
    only (`build_routing`)."""

    bias_keys: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")  # the latter of dense and shared layers

    def get_ignored(self) -> tuple[str, ...]:
        ignored = super().get_ignored()  # transformers writes empty tensors where there are no shared experts
        return (*ignored, r".*\.shared_experts\.") if self.model_config.config.get("n_shared_experts") == 0 else ignored

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterable[tuple[str, LazyTensor]]:
        return split_stacked_experts(super().map_weights(weights))

    def build_rotary(self) -> Rotary:
        interleaved = self.model_config.config.get("rope_interleave", True)
        return Rotary(self.context, self.model_config.config["qk_rope_head_dim"], read_rope_parameters(self.model_config), interleaved)

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        scale = self.model_config.head_dim**-0.5 * compute_yarn_scale(read_rope_parameters(self.model_config))
        return LatentAttention(self.context, self.model_config, layer, prefix, self.rotary, scale)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        if self.is_dense(layer) or not config.get("n_routed_experts"):
            return super().build_mlp(layer, prefix)
        inner = config["moe_intermediate_size"]
        shared = None
        if config.get("n_shared_experts"):
            size, bias = inner * config["n_shared_experts"], self.has_bias("mlp_bias")
            shared = GatedMLP(self.context, f"{prefix}.shared_experts", hidden, size, bias)
        return MoE(self.context, prefix, ExpertSizes(config["n_routed_experts"], hidden, inner), self.build_routing(), shared)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts."""
        return layer < self.model_config.config.get("first_k_dense_replace", 0)

    def build_routing(self) -> RoutingRule:
        """The routing rule of this model generation."""
        config = self.model_config.config
        grouped = config.get("topk_method", "greedy") == "group_limited_greedy"
        return RoutingRule(
            top_k=config["num_experts_per_tok"],
            scale=config.get("routed_scaling_factor", 1.0),
            groups=config["n_group"] if grouped else 1,
            top_groups=config["topk_group"] if grouped else 1,
            precise=True,
        )
