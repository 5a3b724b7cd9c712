"""MiniMax-M2: queries and keys normed over all heads together, partly rotated heads, and sigmoid
routing with a correction bias."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.fused_tensors import split_stacked_experts
from frame.models.mixtral import EXPERT_LAYERS, rename_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_CORRECTION = "e_score_correction_bias"


class MiniMaxM2ForCausalLM(Decoder):
    """The checkpoint names its layers as Mixtral's, and stores the correction bias beside the
    router. Multi-token-prediction modules (`mtp`) are not loaded."""

    mlp_name: ClassVar[str] = "block_sparse_moe"
    ignored_weights: ClassVar[tuple[str, ...]] = (r"(?:model\.)?mtp\.",)

    def build_rotary(self) -> Rotary:
        parameters = read_rope_parameters(self.model_config)
        rotated = self.model_config.config.get("rotary_dim")
        if rotated is None:
            rotated = self.model_config.head_dim * parameters["partial_rotary_factor"]
        return Rotary(self.context, int(rotated), parameters)

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        eps = config.get("rms_norm_eps", 1e-6) if config.get("use_qk_norm", True) else None
        return AttentionOptions(qk_norm=eps, qk_norm_kind="projection")

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        sizes = ExpertSizes(self.model_config.num_experts, self.model_config.hidden_size, config["intermediate_size"], EXPERT_LAYERS)
        rule = RoutingRule(config["num_experts_per_tok"], scoring="sigmoid", renormalize=True, correction=True)
        return MoE(self.context, prefix, sizes, rule)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        for name, tensor in split_stacked_experts(rename_experts(weights), EXPERT_LAYERS):
            yield name.replace(f".{self.mlp_name}.{_CORRECTION}", f".{self.mlp_name}.gate.{_CORRECTION}"), tensor
