"""`KVScales`: the scales of an fp8 KV cache that a checkpoint holds, one for the layer or one for
each KV head.

Used by attention layers. Backends have one scale for the layer; those of heads are applied to
queries, keys, values and results, so that every backend serves them. Must not know a cache.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from frame.core.errors import CheckpointError
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule
from frame.models.layers.weights.layer_weight import set_buffer

if TYPE_CHECKING:
    from frame.core.interfaces.attention_spec import AttentionSpec
    from frame.core.interfaces.model import LazyTensor


class KVScales(nn.Module):
    """`k_scale` and `v_scale` of an fp8 KV cache, under the attention layer `prefix` or its
    projections; 1.0 if the checkpoint has none. `heads`: the KV heads of this rank; a latent is
    one. `is_fp8`: the cache is."""

    of_queries: torch.Tensor  # float32 [heads, 1], as those below
    of_keys: torch.Tensor
    of_values: torch.Tensor
    of_results: torch.Tensor

    def __init__(self, prefix: str, heads: Range, is_fp8: bool = False) -> None:
        super().__init__()
        self.is_fp8 = is_fp8
        self.by_head = False  # whether heads have scales of their own, which are applied here
        self.k_scale, self.v_scale = HeadScales(heads), HeadScales(heads)
        for kind, parameter in (("k", self.k_scale), ("v", self.v_scale)):
            for name in (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"attn.{kind}_scale", f"{kind}_proj.output_scale"):
                parameter.bind(f"{prefix}.{name}")
        self.zero_points = ZeroPoints(heads)
        for name in ("k_zero_point", "v_zero_point"):
            self.zero_points.bind(f"{prefix}.{name}")
        # of quantized attention products, which no backend computes
        self.foreign_weights = [rf"{re.escape(prefix)}\.(attn\.|q_proj\.)?(q_scale|q_zero_point|prob_output_scale)$"]

    def apply_to_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec with the loaded scales of the layer; 1.0 where each head has its own.
        Raises CheckpointError if one is not a positive number."""
        k, v = (parameter.list_values() for parameter in (self.k_scale, self.v_scale))
        if len({*k}) > 1 or len({*v}) > 1:
            return spec
        return replace(spec, k_scale=k[0], v_scale=v[0])

    def split_heads(self, num_heads: int) -> bool:
        """Whether heads have scales of their own, in an fp8 cache; prepares the factors of
        `num_heads` query heads and their keys."""
        k, v = (torch.tensor(parameter.list_values(), device=parameter.device)[:, None] for parameter in (self.k_scale, self.v_scale))
        self.by_head = self.is_fp8 and not (bool((k == k[0]).all()) and bool((v == v[0]).all()))
        group = num_heads // len(k)
        for name, factors in (
            ("of_queries", k.repeat_interleave(group, 0)), ("of_keys", k.reciprocal()),
            ("of_values", v.reciprocal()), ("of_results", v.repeat_interleave(group, 0)),
        ):  # fmt: skip
            set_buffer(self, name, factors)
        return self.by_head

    def divide_keys(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, heads, width], divided by the scales of their heads."""
        return (k * self.of_keys).to(k.dtype), (v * self.of_values).to(v.dtype)

    def multiply_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [tokens, heads, width] times the scales of their keys."""
        return (q * self.of_queries).to(q.dtype)

    def multiply_results(self, out: torch.Tensor) -> torch.Tensor:
        """Results [tokens, heads, width] times the scales of their values."""
        return (out * self.of_results).to(out.dtype)


class ZeroPoints(ShardedParameter):
    """The zero points of keys and values, which must be 0."""

    def __new__(cls, heads: Range) -> ZeroPoints:
        parameter = super().__new__(cls, torch.empty(heads.size), ShardRule(scalar=True), optional=True)
        assert isinstance(parameter, ZeroPoints)
        return parameter

    def load(self, name: str, tensor: LazyTensor) -> None:
        if bool(tensor[...].any()):
            raise CheckpointError(f"{name} is not 0; only KV caches whose values have no zero point are read.")
        self.loaded.add(name)


class HeadScales(ShardedParameter):
    """One scale for each KV head of this rank. The checkpoint has one number, or one for each head
    of the layer ([heads] or compressed-tensors' [heads, 1, 1])."""

    heads: Range

    def __new__(cls, heads: Range) -> HeadScales:
        parameter = super().__new__(cls, torch.empty(heads.size), ShardRule(scalar=True), optional=True)
        assert isinstance(parameter, HeadScales)
        parameter.heads = heads
        return parameter

    def load(self, name: str, tensor: LazyTensor) -> None:
        shape, heads = tuple(tensor.shape), self.heads
        if shape not in ((), (1,), (heads.full,), (heads.full, 1, 1)):
            raise CheckpointError(
                f"{name} has the shape {list(shape)}, but one number, or one for each of {heads.full} KV heads, is expected: "
                "check that config.json belongs to this checkpoint."
            )
        values = tensor[...].reshape(-1)
        self.allocate()
        self.data.copy_(values if len(values) == 1 else values[heads.start : heads.start + heads.size])
        self.loaded.add(name)
        self.version += 1

    def list_values(self) -> list[float]:
        """The scales by head. Raises CheckpointError if one is not a positive number."""
        values: list[float] = self.tolist() if self.loaded else [1.0] * self.heads.size
        for value in values:
            if not 0 < value < float("inf"):
                names = " or ".join(sorted(self.loaded))
                raise CheckpointError(f"{names} is {value}; a scale of the KV cache must be a positive number. Check the checkpoint.")
        return values
