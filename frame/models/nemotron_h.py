"""Nemotron-H, Nemotron Nano 2 and 3: layers that are one of Mamba-2, attention without positions,
feed-forward or experts, with squared ReLU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from frame.core.errors import ConfigurationError
from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder, DraftNames, Layer
from frame.models.layers.linear_attention.convolution import StepPositions
from frame.models.layers.linear_attention.mamba2 import Mamba2, MambaSizes
from frame.models.layers.mlp import PlainMLP
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.norm import RMSNorm
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import read_sigmoid_rule
from frame.models.layers.weights.expert_activation import squared_relu
from frame.models.layers.weights.fused_tensors import split_layers

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}  # of older configs
_RENAMED = {"backbone.embeddings.": "model.embed_tokens.", "backbone.norm_f.": "model.norm.", "backbone.": "model."}


class NemotronHForCausalLM(Decoder):
    """`layers_block_type`, or the letters of `hybrid_override_pattern`, say what each layer is.
    Those of a prediction module have a list of their own."""

    ignored_weights: ClassVar[tuple[str, ...]] = (r"mtp\.",)
    bias_keys: ClassVar[tuple[str, ...]] = ("mlp_bias",)

    def build_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.context, name, self.model_config.hidden_size, self.model_config.config.get("layer_norm_epsilon", 1e-5))

    def build_rotary(self) -> Rotary:
        """No layer rotates; the table is not read."""
        config = self.model_config.config
        if config.get("mlp_hidden_act", "relu2") != "relu2" or config.get("moe_latent_size"):
            raise ConfigurationError(
                f"{self.model_config.architecture} with moe_latent_size or another mlp_hidden_act than relu2 is not implemented here."
            )
        self.sizes = MambaSizes.read_config(config)
        self.positions = StepPositions(self.sizes.width)
        self.kinds = _read_kinds(config.get("layers_block_type") or config["hybrid_override_pattern"])
        self.draft_kinds = _read_kinds(config.get("mtp_layers_block_type") or config.get("mtp_hybrid_override_pattern") or "*E")
        return Rotary(self.context, self.model_config.head_dim, {**read_rope_parameters(self.model_config), "rope_type": "none"})

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        return self._build_kind(self.kinds[index], index, prefix)

    def find_draft_names(self) -> DraftNames:
        layers = [f"mtp.layers.{place}" for place in range(len(self.draft_kinds))]
        first, last = layers[0], layers[-1]
        return DraftNames("mtp.", f"{first}.enorm", f"{first}.hnorm", f"{first}.eh_proj", f"{last}.final_layernorm", tuple(layers))

    def build_draft_layer(self, index: int, prefix: str) -> nn.Module:
        kind = self.draft_kinds[int(prefix.rpartition(".")[2])]
        if kind == "linear_attention":
            raise ConfigurationError("a prediction module with recurrent layers is not implemented: choose another speculative.algorithm")
        return self._build_kind(kind, index, prefix)

    def _build_kind(self, kind: str, index: int, prefix: str) -> nn.Module:
        name = f"{prefix}.mixer"
        norm = self.build_norm(f"{prefix}.norm")
        if kind == "linear_attention":
            return Layer(norm, Mamba2(self.context, index, name, self.sizes, self.positions), None)
        if kind == "full_attention":
            return Layer(norm, self.build_attention(index, name), None)
        return Layer(norm, None, self._build_experts(name) if kind == "moe" else self.build_mlp(index, name))

    def get_attention_options(self, layer: int) -> AttentionOptions:
        return replace(super().get_attention_options(layer), rotates=False)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        bias = self.has_bias("mlp_bias")
        return PlainMLP(self.context, prefix, hidden, config["intermediate_size"], bias, squared_relu)

    def _build_experts(self, prefix: str) -> nn.Module:
        config, hidden = self.model_config.config, self.model_config.hidden_size
        bias = self.has_bias("mlp_bias")
        sizes = ExpertSizes(self.model_config.num_experts, hidden, config["moe_intermediate_size"], activation=squared_relu, gated=False)
        rule = read_sigmoid_rule(config)
        inner = config["moe_shared_expert_intermediate_size"]
        shared = PlainMLP(self.context, f"{prefix}.shared_experts", hidden, inner, bias, squared_relu)
        return MoE(self.context, prefix, sizes, rule, shared)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        return split_layers(self._rename_body(weights), self.sizes.fused, self.context.weight_format)

    @staticmethod
    def _rename_body(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        for name, tensor in weights:
            known = next((prefix for prefix in _RENAMED if name.startswith(prefix)), None)
            yield (name if known is None else _RENAMED[known] + name.removeprefix(known)), tensor


def _read_kinds(listed: list[str] | str) -> list[str]:
    """The kinds of layers, from their names or letters."""
    kinds = [_PATTERN[letter] for letter in listed] if isinstance(listed, str) else listed
    return [_NAMES.get(kind, kind) for kind in kinds]
