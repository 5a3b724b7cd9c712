"""The scales of an attention layer's fp8 cache, where a checkpoint brings them.

Knows checkpoint names; dividing and multiplying is the pool's and the backends' work.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from frame.core.errors import CheckpointError
from frame.models.layers.parameter import ShardedParameter, ShardRule

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionSpec


class KVScales(nn.Module):
    """`k_scale` and `v_scale`, one number each, under the attention layer `prefix` or under its projections; 1.0 where there is none."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.k_scale = ShardedParameter(torch.empty(()), ShardRule(scalar=True), optional=True)
        self.v_scale = ShardedParameter(torch.empty(()), ShardRule(scalar=True), optional=True)
        for kind, parameter in (("k", self.k_scale), ("v", self.v_scale)):
            for place in ("", f"{kind}_proj.", "attn."):
                parameter.bind(f"{prefix}.{place}{kind}_scale")

    def put_into(self, spec: AttentionSpec) -> AttentionSpec:
        """The spec with the scales that were loaded. Raises CheckpointError for one that is no positive number."""
        return replace(spec, k_scale=self._value(self.k_scale), v_scale=self._value(self.v_scale))

    def _value(self, parameter: ShardedParameter) -> float:
        value = float(parameter) if parameter.loaded else 1.0
        if not (math.isfinite(value) and value > 0):
            names = " or ".join(sorted(parameter.loaded))
            raise CheckpointError(f"{names} is {value}; a scale of the KV cache must be a positive number: is the checkpoint damaged?")
        return value
