"""gpt-oss: sinks, sliding windows in every second layer, and experts with biases and a clamped
activation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from frame.models.layers.attention import AttentionOptions, find_layer_window
from frame.models.layers.decoder import Decoder
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.expert_activation import ClampedSwiGLU
from frame.models.layers.weights.fused_tensors import split_expert_biases, split_experts, split_packed_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_PATTERN = 2  # every second layer has full attention, unless the config lists the layers
_ALPHA, _LIMIT = 1.702, 7.0  # of the activation


class GptOssForCausalLM(Decoder):
    """The checkpoint stores all experts of a layer in one tensor, with gate and up interleaved, and
    names the router `router`."""

    def get_attention_options(self, layer: int) -> AttentionOptions:
        bias = bool(self.model_config.config.get("attention_bias", True))
        window = find_layer_window(self.model_config, layer, _PATTERN)
        return AttentionOptions(qkv_bias=bias, out_bias=bias, sliding_window=window, sinks=True)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        activation = ClampedSwiGLU(config.get("swiglu_alpha") or _ALPHA, config.get("swiglu_limit") or _LIMIT)
        sizes = ExpertSizes(
            self.model_config.num_experts, self.model_config.hidden_size, config["intermediate_size"], bias=True, activation=activation
        )
        top_k = config.get("num_experts_per_tok") or config["experts_per_token"]
        return MoE(self.context, prefix, sizes, RoutingRule(top_k, renormalize=True, bias=True))

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        for name, tensor in weights:
            prefix, _, last = name.rpartition(".")
            if last == "gate_up_proj":
                yield from split_experts(prefix, tensor, ("gate_proj", "up_proj"), interleaved=True)
            elif last == "down_proj":
                yield from split_experts(prefix, tensor, ("down_proj",), interleaved=False)
            elif last in ("gate_up_proj_bias", "down_proj_bias"):
                yield from split_expert_biases(prefix, tensor, _list_layers(last))
            elif last.endswith(("_proj_blocks", "_proj_scales")):  # MXFP4
                yield from split_packed_experts(prefix, tensor, _list_layers(last), last.rpartition("_")[2])
            else:
                yield name.replace(".mlp.router.", ".mlp.gate."), tensor


def _list_layers(name: str) -> tuple[str, ...]:
    """The layers of a stacked tensor."""
    return ("gate_proj", "up_proj") if name.startswith("gate_up_proj") else ("down_proj",)
