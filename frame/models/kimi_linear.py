"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the
others, and DeepSeek-V3's routing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from frame.core.interfaces.model import find_dense_layers
from frame.models.layers.decoder import Decoder, match_draft_layers
from frame.models.layers.linear_attention.convolution import StepPositions
from frame.models.layers.linear_attention.kimi_delta import KimiDeltaAttention, read_sizes
from frame.models.layers.mla import LatentAttention
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import read_sigmoid_rule

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

# its names of DeepSeek-V3's settings
_ROUTING = {"num_experts_per_token": "num_experts_per_tok", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group"}
_PATTERN = 4  # every fourth layer after the first has full attention, unless the config lists the layers


class KimiLinearForCausalLM(Decoder):
    """The checkpoint names every feed-forward part `block_sparse_moe`, or the dense ones `mlp`."""

    def get_ignored(self) -> tuple[str, ...]:
        return (*super().get_ignored(), match_draft_layers(self.model_config))

    def build_rotary(self) -> Rotary:
        config = self.model_config.config
        self.positions = StepPositions(read_sizes(config)[2])
        return Rotary(self.context, config["qk_rope_head_dim"], {**read_rope_parameters(self.model_config), "rope_type": "none"})

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        if self._is_linear(layer):
            return KimiDeltaAttention(self.context, layer, prefix, config, self.positions)
        return LatentAttention(self.context, self.model_config, layer, prefix, self.rotary, self.model_config.head_dim**-0.5)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        if layer in find_dense_layers(config, self.model_config.num_layers, 1):
            return super().build_mlp(layer, prefix)
        inner = config["moe_intermediate_size"]
        rule = read_sigmoid_rule({**config, **{name: config[own] for own, name in _ROUTING.items() if own in config}})
        shared = GatedMLP(self.context, f"{prefix}.shared_experts", hidden, inner * config.get("num_shared_experts", 1))
        sizes = ExpertSizes(self.model_config.num_experts, hidden, inner, ("w1", "w3", "w2"))
        return MoE(self.context, prefix, sizes, rule, shared)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        for name, tensor in weights:  # `forget_gate`: a module of transformers, whose name adapters have
            yield name.replace(".block_sparse_moe.", ".mlp.").replace(".forget_gate.", "."), tensor

    def _is_linear(self, layer: int) -> bool:
        """By `layer_types`, or by the list of layers that `linear_attn_config` counts from 1;
        without either, by the pattern of transformers."""
        config = self.model_config.config
        kinds, nested = config.get("layer_types"), config.get("linear_attn_config") or {}
        if kinds:
            return bool(kinds[layer] == "linear_attention")
        if "kda_layers" not in nested:
            return not layer or layer % _PATTERN != 0
        return layer + 1 in nested["kda_layers"]
