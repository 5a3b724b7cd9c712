"""Llama 4: attention in chunks, with every fourth layer whole and without positions, and one
expert of each token beside a shared one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from frame.core.errors import ConfigurationError
from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions
from frame.models.layers.mlp import GatedMLP, read_activation
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.fused_tensors import split_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_INTERVAL = 4  # every fourth layer does not rotate, unless the config lists the layers
_TEMPERATURE = (0.1, 8192)  # beta and scale of the query temperature, unless the config names them


class Llama4ForCausalLM(ReadsMedia):
    """The checkpoint stores all experts of a layer in one tensor, and names the feed-forward part
    `feed_forward` and its router `router`."""

    mlp_name: ClassVar[str] = "feed_forward"

    def build_rotary(self) -> Rotary:
        return Rotary(self.context, self.model_config.head_dim, read_rope_parameters(self.model_config), interleaved=True)

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        listed = config.get("no_rope_layers")
        rotates = bool(listed[layer]) if listed else bool((layer + 1) % (config.get("no_rope_layer_interval") or _INTERVAL))
        kinds = config.get("layer_types")
        is_chunked = kinds[layer] == "chunked_attention" if kinds else rotates
        temperature = None
        if config.get("attn_temperature_tuning", True) and not rotates:
            temperature = (config.get("attn_scale", _TEMPERATURE[0]), config.get("floor_scale", _TEMPERATURE[1]), 1)
        return replace(
            super().get_attention_options(layer),
            qk_norm=config.get("rms_norm_eps", 1e-5) if config.get("use_qk_norm", True) and rotates else None,
            qk_norm_kind="rotated",
            sliding_window=self.model_config.sliding_window if is_chunked else None,
            chunked=is_chunked and self.model_config.sliding_window is not None,
            rotates=rotates,
            temperature=temperature,
        )

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        step = config.get("interleave_moe_layer_step") or 1
        listed = config.get("moe_layers")
        if layer not in listed if listed is not None else (layer + 1) % step:
            return GatedMLP(self.context, prefix, hidden, config["intermediate_size_mlp"], activation=read_activation(config))
        if config.get("num_experts_per_tok", 1) != 1:
            raise ConfigurationError("num_experts_per_tok above 1 is not implemented for Llama 4, whose router scales an expert's input.")
        sizes = ExpertSizes(self.model_config.num_experts, hidden, config["intermediate_size"])
        shared = GatedMLP(self.context, f"{prefix}.shared_expert", hidden, config["intermediate_size"])
        return MoE(self.context, prefix, sizes, RoutingRule(1, scoring="sigmoid", scales_input=True), shared)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        for name, tensor in super().map_weights(weights):
            prefix, _, last = name.rpartition(".")
            if last == "gate_up_proj":
                yield from split_experts(prefix, tensor, ("gate_proj", "up_proj"), interleaved=False)
            elif prefix.endswith(".experts") and last == "down_proj":
                yield from split_experts(prefix, tensor, ("down_proj",), interleaved=False)
            else:
                yield name.replace(".feed_forward.router.", ".feed_forward.gate."), tensor
