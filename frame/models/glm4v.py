"""GLM-4.1V and GLM-4.6V-Flash: norms before and after attention and feed-forward, and partly
rotated heads whose pairs are neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from frame.core.errors import ConfigurationError
from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import NormedOutputLayer
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.weights.fused_tensors import split_layers

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm", "input_layernorm", "post_attention_layernorm")
_ROTATED = 0.5  # share of a head that rotates, unless the config says otherwise


class Glm4vForConditionalGeneration(ReadsMedia):
    """The checkpoint stores gate and up as one tensor."""

    def build_rotary(self) -> Rotary:
        config = self.model_config.config
        if str(config.get("model_type")).endswith("moe_text"):
            raise ConfigurationError("GLM-4.6V with experts is not implemented here, only GLM-4.1V and GLM-4.6V-Flash.")
        stored = config.get("rope_parameters") or config.get("rope_scaling") or {}
        share = stored.get("partial_rotary_factor") or config.get("partial_rotary_factor") or _ROTATED
        return Rotary(self.context, int(self.model_config.head_dim * share), read_rope_parameters(self.model_config), interleaved=True)

    def get_attention_options(self, layer: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=bool(self.model_config.config.get("attention_bias", True)))

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        norms = [self.build_norm(f"{prefix}.{name}") for name in _NORMS]
        attention, mlp = self.build_attention(index, f"{prefix}.self_attn"), self.build_mlp(index, f"{prefix}.mlp")
        return NormedOutputLayer(attention, mlp, (norms[0], norms[1]), (norms[2], norms[3]))

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        inner = self.model_config.config["intermediate_size"]
        fused = {"gate_up_proj": {"gate_proj": inner, "up_proj": inner}}
        return split_layers(super().map_weights(weights), fused, self.context.weight_format)
