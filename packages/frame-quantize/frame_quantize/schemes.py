"""The methods of `frame quantize`, as weight schemes of compressed-tensors. Plain data: the command
lists them without importing a library."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Method:
    """A method. `weights`: fields of compressed-tensors' `QuantizationArgs`. `activations`: those
    of the input activations; None: they keep the model's type. `is_calibrated`: the method reads
    sample texts."""

    summary: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None
    is_calibrated: bool = False


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "fp8": Method("e4m3, a scale per output", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKEN),
        "int8": Method("int8, a scale per output", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        "int4": Method("int4 per group of inputs, round-to-nearest", _INT4),
        "gptq": Method("int4 per group of inputs, GPTQ", _INT4, is_calibrated=True),
        "awq": Method("int4 with zero points per group of inputs, AWQ", {**_INT4, "symmetric": False}, is_calibrated=True),
    }
)

_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
CACHE_SCALES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"layer": {**_CACHE, "strategy": "tensor"}, "head": {**_CACHE, "strategy": "attn_head"}}
)

# Layers that stay unquantized: embeddings, the head, norms, and routers of experts.
UNQUANTIZED = ("re:.*embed.*", "re:.*lm_head$", "re:.*norm.*", "re:.*\\.gate$", "re:.*router.*", "re:.*shared_expert_gate$")
