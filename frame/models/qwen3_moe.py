"""Qwen3-MoE, Qwen3-VL-MoE and the thinker of Qwen3-Omni: Qwen3's attention with normed queries and
keys, and experts without a shared one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions
from frame.models.layers.moe import ExpertSizes, MoE, is_moe_layer
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.fused_tensors import split_experts, split_stacked_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor


_RENORMALIZING = "Qwen3VL"  # whatever norm_topk_prob says, as in transformers
_RENORMALIZING_BY_DEFAULT = "Qwen3Omni"


class Qwen3MoeForCausalLM(ReadsMedia):
    """Layers in `mlp_only_layers`, and those that `decoder_sparse_step` skips, are dense."""

    ignored_weights: ClassVar[tuple[str, ...]] = (r"(?:talker|code2wav)\.",)  # of Qwen3-Omni, which speak

    def get_attention_options(self, layer: int) -> AttentionOptions:
        config = self.model_config.config
        window = config.get("sliding_window") if config.get("use_sliding_window", False) else None  # all layers or none
        return replace(super().get_attention_options(layer), qk_norm=config.get("rms_norm_eps", 1e-6), sliding_window=window)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        if not is_moe_layer(layer, config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()):
            return super().build_mlp(layer, prefix)
        num_experts = config.get("num_experts") or config["num_local_experts"]
        sizes = ExpertSizes(num_experts, hidden, config["moe_intermediate_size"])
        name = self.model_config.architecture
        renormalizes = name.startswith(_RENORMALIZING) or bool(config.get("norm_topk_prob", name.startswith(_RENORMALIZING_BY_DEFAULT)))
        rule = RoutingRule(config["num_experts_per_tok"], renormalize=renormalizes)
        return MoE(self.context, prefix, sizes, rule)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        """Qwen3-VL-MoE stores all experts of a layer in one tensor, [experts, inputs, outputs], as
        published, or [experts, outputs, inputs]."""
        hidden = self.model_config.hidden_size
        for name, tensor in super().map_weights(weights):
            prefix, _, last = name.rpartition(".")
            is_fused = prefix.endswith(".experts") and last in ("gate_up_proj", "down_proj")
            if is_fused and tensor.shape[2 if last == "gate_up_proj" else 1] != hidden:
                names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
                yield from split_experts(prefix, tensor, names, interleaved=False)
            else:
                yield from split_stacked_experts([(name, tensor)])
