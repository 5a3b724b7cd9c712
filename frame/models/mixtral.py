"""Mixtral: Llama's attention, and experts of which the best two are renormalised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.fused_tensors import split_stacked_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

EXPERT_LAYERS = ("w1", "w3", "w2")  # gate, up and down


class MixtralForCausalLM(Decoder):
    """The checkpoint names the MoE layer `block_sparse_moe`, and an expert's layers w1 (gate), w3
    (up) and w2 (down); under the names of transformers 5 it is `mlp`, with stacked experts."""

    mlp_name: ClassVar[str] = "block_sparse_moe"

    def get_attention_options(self, layer: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=self.model_config.sliding_window)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        sizes = ExpertSizes(config["num_local_experts"], self.model_config.hidden_size, config["intermediate_size"], EXPERT_LAYERS)
        return MoE(self.context, prefix, sizes, RoutingRule(config["num_experts_per_tok"], renormalize=True))

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        return split_stacked_experts(rename_experts(weights), EXPERT_LAYERS)


def rename_experts(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of MoE layers under their names in published checkpoints."""
    for name, tensor in weights:
        yield name.replace(".mlp.", ".block_sparse_moe."), tensor
