"""Falcon-H1: attention beside Mamba-2 in each layer, and a multiplier for each part of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.models.layers.attention import AttentionOptions
from frame.models.layers.decoder import Decoder, Layer, Norm
from frame.models.layers.linear_attention.convolution import StepPositions
from frame.models.layers.linear_attention.mamba2 import Mamba2, MambaSizes
from frame.models.layers.mlp import GatedMLP, read_activation
from frame.models.layers.rotary import Rotary
from frame.models.layers.weights.fused_tensors import split_layers

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import LazyTensor
    from frame.models.layers.linear import RankSum

_LAST_NORM = "model.final_layernorm."
_NO_LIMIT = {"__float__": "Infinity"}  # as transformers writes infinity


class FalconH1ForCausalLM(Decoder):
    """The states of Mamba-2 have indices in the cache after those of all attention layers."""

    def build_rotary(self) -> Rotary:
        self.sizes = read_sizes(self.model_config.config)
        self.positions = StepPositions(self.sizes.width)
        return super().build_rotary()

    def get_attention_options(self, layer: int) -> AttentionOptions:
        """The multiplier of keys is one of scores: the cache holds keys without it."""
        scale = self.model_config.head_dim**-0.5 * read_multiplier(self.model_config.config, "key_multiplier")
        return replace(super().get_attention_options(layer), scale=scale)

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        place = self.model_config.num_layers + index
        return HybridLayer(
            (self.build_norm(f"{prefix}.input_layernorm"), self.build_norm(f"{prefix}.pre_ff_layernorm")),
            Scaled(
                self.build_attention(index, f"{prefix}.self_attn"),
                read_multiplier(config, "attention_in_multiplier"),
                read_multiplier(config, "attention_out_multiplier"),
            ),
            Scaled(
                Mamba2(self.context, place, f"{prefix}.mamba", self.sizes, self.positions),
                read_multiplier(config, "ssm_in_multiplier"),
                read_multiplier(config, "ssm_out_multiplier"),
            ),
            self.build_mlp(index, f"{prefix}.feed_forward"),
        )

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        if read_activation(config) != "silu":
            raise ConfigurationError(f"{self.model_config.architecture} with hidden_act {config['hidden_act']!r} is not implemented here.")
        mlp = ScaledMLP(self.context, prefix, self.model_config.hidden_size, config["intermediate_size"], bool(config.get("mlp_bias")))
        mlp.multipliers = read_multipliers(config, "mlp_multipliers", 2)
        return mlp

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) * read_multiplier(self.model_config.config, "embedding_multiplier")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) * read_multiplier(self.model_config.config, "lm_head_multiplier")

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        renamed = ((name.replace(_LAST_NORM, "model.norm."), tensor) for name, tensor in weights)
        return split_layers(renamed, self.sizes.fused, self.context.weight_format)


class Scaled(nn.Module):
    """A part that mixes tokens, with factors of its input and of its result."""

    def __init__(self, mixer: nn.Module, before: float, after: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        out: torch.Tensor = self.mixer(x * self.before, rows, batch)
        return out * self.after


class HybridLayer(Layer):
    """Attention and a recurrence have the same input, and the feed-forward follows their sum.
    `norms`: before the two, and before the feed-forward."""

    def __init__(self, norms: tuple[Norm, Norm], attention: nn.Module, recurrence: nn.Module, mlp: nn.Module) -> None:
        super().__init__(norms[0], attention, mlp)
        self.post_norm, self.recurrence = norms[1], recurrence

    def mix_tokens(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        mixed: torch.Tensor = self.recurrence(x, rows, batch) + self.attention(x, rows, batch)
        return mixed

    def feed_forward(self, x: torch.Tensor | RankSum, residual: torch.Tensor) -> tuple[torch.Tensor | RankSum, torch.Tensor]:
        x, residual = self.post_norm.add_residual(x, residual)
        return self.mlp(x), residual


class ScaledMLP(GatedMLP):
    """down(SiLU(gate(x) * first) * up(x)) * second, with `multipliers` (first, second)."""

    multipliers: tuple[float, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, -1)
        gate *= self.multipliers[0]
        is_fused = self.kernel is not None and not torch.compiler.is_compiling()
        inner = self.kernel(gate_up) if self.kernel is not None and is_fused else self.silu(gate).mul_(up)
        return self.down_proj(inner) * self.multipliers[1]


def read_sizes(config: Mapping[str, Any]) -> MambaSizes:
    """The sizes of the recurrence. Raises ConfigurationError for those that do not fit together,
    and for an upper limit of the time step."""
    heads, hidden = config["mamba_n_heads"], config["hidden_size"]
    inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand", 2) * hidden)
    head = config.get("mamba_d_head")
    head = inner // heads if head in (None, "auto") else head
    if head * heads != inner:
        raise ConfigurationError(f"config.json has mamba_n_heads {heads} of {head} entries, but mamba_d_ssm is {inner}.")
    limits = config.get("time_step_limit") or (0.0, _NO_LIMIT)
    if not isinstance(limits, list | tuple) or len(limits) != 2 or limits[1] not in (_NO_LIMIT, math.inf):
        raise ConfigurationError(f"time_step_limit of config.json is {limits!r}; only limits from below are implemented here.")
    norm_first = bool(config.get("mamba_norm_before_gate", True))
    return MambaSizes(
        hidden=hidden,
        heads=heads,
        head=head,
        groups=config.get("mamba_n_groups", 1),
        state=config["mamba_d_state"],
        width=config.get("mamba_d_conv", 4),
        eps=config.get("rms_norm_eps", 1e-5),
        min_step=read_multiplier({"time_step_limit": limits[0]}, "time_step_limit"),
        bias=bool(config.get("mamba_proj_bias", False)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        out_bias=bool(config.get("projectors_bias", False)),
        norm=("silu" if norm_first else "silu_first") if config.get("mamba_rms_norm") else None,
        multipliers=read_multipliers(config, "ssm_multipliers", 5),
    )


def read_multiplier(config: Mapping[str, Any], name: str) -> float:
    """A factor of the config; 1.0 without it. Raises ConfigurationError for another type."""
    value = config.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name} of config.json is {value!r}; a number is expected.")
    return float(value)


def read_multipliers(config: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """As `read_multiplier`, of a list of `count` factors."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list | tuple) or len(values) != count:
        raise ConfigurationError(f"{name} of config.json is {values!r}; a list of {count} numbers is expected.")
    return tuple(read_multiplier({name: value}, name) for value in values)
