"""`ConfigFields`: config.json as models read it, with an error that names a field that is missing,
and the types of fields that models compute with.

Used by `model_config` and where models are built. Must not know an architecture.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frame.core.errors import CheckpointError

_ROPE = ("rope_parameters", "rope_scaling")
_NUMBERS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
    "routed_scaling_factor", "logit_scale", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "embedding_multiplier", "lm_head_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
)  # fmt: skip
# Must be above 0: a norm takes a root, a frequency is a power, and the others divide.
_POSITIVE = frozenset(
    (
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta", "rope_local_base_freq",
        "query_pre_attn_scalar", "logits_scaling", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
        "attention_factor", "original_max_position_embeddings",
    )
)  # fmt: skip
_FACTORS = ("short_factor", "long_factor")  # of LongRoPE, one for each pair
_ROPE_NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "partial_rotary_factor", "original_max_position_embeddings",
)  # fmt: skip


class ConfigFields(dict[str, Any]):
    """Raises CheckpointError for a field that a model reads without a default."""

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(f"config.json has no {name}, which this architecture needs: download the checkpoint again.")


def check_fields(file: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a field that is no number, or none that a model can compute with,
    and for settings of rotary embeddings of another type."""
    _check_numbers(file, "", config, _NUMBERS)
    for name in _ROPE:
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"{file}: {name} is {reprlib.repr(rope)}; a JSON object is expected.")
        _check_numbers(file, f"{name}.", rope, _ROPE_NUMBERS)
        for kind, each in rope.items():  # one entry for each kind of layer
            if isinstance(each, Mapping):
                _check_numbers(file, f"{name}.{kind}.", each, _ROPE_NUMBERS)


def check_layer_list(file: Path, config: Mapping[str, Any], num_layers: int) -> None:
    """Raise CheckpointError unless `mlp_layer_types`, if there, has an entry for each layer."""
    kinds = config.get("mlp_layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) >= num_layers and all(isinstance(kind, str) for kind in kinds)):
        raise CheckpointError(
            f"{file}: mlp_layer_types is {reprlib.repr(kinds)}; a list of dense or sparse for each of {num_layers} layers is expected."
        )


def _check_numbers(file: Path, where: str, config: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise CheckpointError(f"{file}: {where}{name} is {reprlib.repr(value)}; a number is expected.")
        if value is not None and value <= 0 and name in _POSITIVE:
            raise CheckpointError(f"{file}: {where}{name} is {reprlib.repr(value)}; a number above 0 is expected.")
    for name in _FACTORS:
        factors = config.get(name)
        if factors is not None and not (isinstance(factors, list) and factors and all(_is_positive(each) for each in factors)):
            raise CheckpointError(f"{file}: {where}{name} is {reprlib.repr(factors)}; a list of numbers above 0 is expected.")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
