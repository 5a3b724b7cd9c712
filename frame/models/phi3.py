"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's layers, stored with one tensor for queries,
keys and values, and one for gate and up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.weights.fused_tensors import split_layers

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor


class Phi3ForCausalLM(Decoder):
    """LongRoPE uses the long factors if the context limit exceeds the original context. The sliding
    window is that of all layers."""

    def build_rotary(self) -> Rotary:
        parameters = read_rope_parameters(self.model_config)
        return Rotary(self.context, int(self.model_config.head_dim * parameters["partial_rotary_factor"]), parameters)

    def get_attention_options(self, layer: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=self.model_config.config.get("sliding_window") or None)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        sizes, inner = self.model_config, self.model_config.config["intermediate_size"]
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        fused = {
            "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
        }
        return split_layers(weights, fused, self.context.weight_format)
