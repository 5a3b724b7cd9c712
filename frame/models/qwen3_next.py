"""Qwen3-Next, and Qwen3.5 and Qwen3.6, dense and with experts: three layers of gated delta network
to one of attention with an output gate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from frame.models.encoders import ReadsMedia
from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import DecoderLayer, DraftNames
from frame.models.layers.linear_attention.convolution import StepPositions
from frame.models.layers.linear_attention.gated_delta import DeltaSizes, GatedDeltaNet
from frame.models.layers.moe import ExpertSizes, GatedSharedExpert, MoE, is_moe_layer
from frame.models.layers.norm import RMSNorm
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.fused_tensors import split_layers, split_stacked_experts

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_OFFSET = 1.0  # the checkpoints store the weights of norms minus one
_INTERVAL = 4  # every fourth layer has full attention, unless the config lists the layers
_ROTATED = 0.25  # share of a head that rotates, unless the config says otherwise


class Qwen3NextForCausalLM(ReadsMedia):
    """Qwen3-Next stores the projections of its linear attention by key head."""

    ignored_weights: ClassVar[tuple[str, ...]] = (r"(?:model\.)?mtp\.",)

    def build_norm(self, name: str) -> RMSNorm:
        eps = self.model_config.config.get("rms_norm_eps", 1e-6)
        return RMSNorm(self.context, name, self.model_config.hidden_size, eps, _OFFSET)

    def build_rotary(self) -> Rotary:
        config = self.model_config.config
        self.sizes = DeltaSizes.read_config(config, self.model_config.architecture.startswith("Qwen3Next"))
        self.positions = StepPositions(self.sizes.width)
        stored = config.get("rope_parameters") or config.get("rope_scaling") or {}
        share = stored.get("partial_rotary_factor") or config.get("partial_rotary_factor") or _ROTATED
        return Rotary(self.context, int(self.model_config.head_dim * share), read_rope_parameters(self.model_config))

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        kinds = config.get("layer_types")
        interval = config.get("full_attention_interval") or _INTERVAL
        is_linear = kinds[index] == "linear_attention" if kinds else bool((index + 1) % interval)
        if not is_linear:
            return self.build_draft_layer(index, prefix)
        mixer = GatedDeltaNet(self.context, index, f"{prefix}.linear_attn", self.sizes, self.positions)
        return self._build_with(mixer, index, prefix)

    def find_draft_names(self) -> DraftNames:
        return DraftNames("mtp.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", ("mtp.layers.0",))

    def build_draft_layer(self, index: int, prefix: str) -> nn.Module:
        return self._build_with(self.build_attention(index, f"{prefix}.self_attn"), index, prefix)

    def _build_with(self, mixer: nn.Module, index: int, prefix: str) -> nn.Module:
        norms = [self.build_norm(f"{prefix}.{name}") for name in ("input_layernorm", "post_attention_layernorm")]
        return DecoderLayer(norms[0], mixer, norms[1], self.build_mlp(index, f"{prefix}.mlp"))

    def get_attention_options(self, layer: int) -> AttentionOptions:
        eps = self.model_config.config.get("rms_norm_eps", 1e-6)
        return replace(super().get_attention_options(layer), qk_norm=eps, norm_offset=_OFFSET, gated=True)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        is_moe = is_moe_layer(layer, config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ())
        if not (self.model_config.num_experts and is_moe):
            return super().build_mlp(layer, prefix)
        sizes = ExpertSizes(self.model_config.num_experts, hidden, config["moe_intermediate_size"])
        renormalizes = self.model_config.architecture.startswith("Qwen3_5") or bool(config.get("norm_topk_prob", True))
        rule = RoutingRule(config["num_experts_per_tok"], renormalize=renormalizes)
        shared_size = config["shared_expert_intermediate_size"]
        shared = GatedSharedExpert(self.context, f"{prefix}.shared_expert", f"{prefix}.shared_expert_gate", hidden, shared_size)
        return MoE(self.context, prefix, sizes, rule, shared)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        return split_layers(split_stacked_experts(super().map_weights(weights)), self.sizes.fused, self.context.weight_format)
