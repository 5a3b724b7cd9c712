"""Lower bounds of the time of a workload: bytes to read and operations to compute, divided by the
peak rates of the machine.

A decode step reads its weights and all cached tokens once or computes its matrix products,
whichever takes longer; prefill counts operations only. Launches, sampling and host time count as 0.
Must not know an engine; sizes come from a model's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frame.core.interfaces.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of a machine. read: bytes/s. operations: operations/s of dense products (a
    multiply-add counts as two). copy: bytes/s read plus written; 0: not measured."""

    read: float
    operations: float
    copy: float = 0.0

    def seconds(self, read: float, operations: float) -> float:
        """Lower bound of the time of work that reads and computes at the same time."""
        return max(read / self.read, operations / self.operations)


H200 = Ceilings(4.39e12, 780e12, 4.28e12)  # one H200, bf16, measured: docs/performance.md


@dataclass(frozen=True, slots=True)
class LayerCost:
    """`count` equal layers; sizes in values per layer. dense: matrices that every token uses.
    experts: number of experts, each of `expert` values, of which a token uses `active`."""

    count: int
    dense: int
    experts: int = 0
    expert: int = 0
    active: int = 0

    def read(self, rows: int) -> float:
        """Values of matrices that a step of `rows` tokens reads, with uniform routing."""
        touched = self.experts * (1 - (1 - self.active / self.experts) ** rows) if self.experts else 0
        return self.count * (self.dense + touched * self.expert)

    @property
    def met(self) -> int:
        """Values of matrices that a token is multiplied with."""
        return self.count * (self.dense + self.active * self.expert)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Sizes of a model in values.

    head: the output matrix. cached: one token's KV cache in all layers. pair: operations per
    (query, key) pair in all layers. weight_bytes, cache_bytes: bytes per value.
    """

    layers: tuple[LayerCost, ...]
    head: int
    cached: int
    pair: int
    weight_bytes: float = 2
    cache_bytes: int = 2

    @classmethod
    def of(cls, model_config: ModelConfig, weight_bytes: float = 2, cache_bytes: int = 2) -> ModelCost | None:
        """The sizes of a model; None if they cannot be computed (encoders, sliding windows, unknown
        configuration names)."""
        layers = _layers(model_config)
        if model_config.encoder or model_config.sliding_window is not None or layers is None:
            return None
        cached = (
            sum(model_config.latent)
            if model_config.latent
            else model_config.num_kv_heads * (model_config.head_dim + model_config.v_head_dim)
        )
        return cls(
            layers=layers,
            head=model_config.hidden_size * model_config.vocab_size,
            cached=model_config.num_layers * cached,
            pair=model_config.num_layers * 2 * model_config.num_heads * (model_config.head_dim + model_config.v_head_dim),
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
        )

    def prefill(self, lengths: Sequence[int], cached: int = 0) -> float:
        """Operations to prefill prompts of these lengths, with the first `cached` tokens of each in
        the KV cache."""
        matrices = 2 * sum(layers.met for layers in self.layers)
        pairs = self.pair / 2  # causal: a token attends to half of its prompt on average
        return float(sum((n - cached) * matrices + 2 * self.head + pairs * (n * n - cached * cached) for n in lengths))

    def step(self, rows: int, tokens: float) -> tuple[float, float]:
        """(bytes, operations) of one decode step of `rows` sequences with `tokens` cached tokens in
        total."""
        read = self.weight_bytes * (sum(layers.read(rows) for layers in self.layers) + self.head) + self.cache_bytes * tokens * self.cached
        return read, float(2 * rows * (sum(layers.met for layers in self.layers) + self.head))


def _layers(model_config: ModelConfig) -> tuple[LayerCost, ...] | None:
    """Dense and MoE layers; None if a size has an unknown configuration name."""
    config: dict[str, Any] = model_config.config
    hidden, attention = model_config.hidden_size, _attention(model_config)
    inner, of_expert = config.get("intermediate_size"), config.get("moe_intermediate_size")
    if not model_config.num_experts:
        return (LayerCost(model_config.num_layers, attention + 3 * hidden * inner),) if isinstance(inner, int) else None
    expert = of_expert or inner
    active = config.get("num_experts_per_tok")
    if not isinstance(expert, int) or not isinstance(active, int):
        return None
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * expert
    step = config.get("decoder_sparse_step") or 1
    plain = len({*range(config.get("first_k_dense_replace") or 0), *(config.get("mlp_only_layers") or ())})
    if step != 1:
        return None
    mixtures = LayerCost(
        model_config.num_layers - plain, attention + 3 * hidden * shared, model_config.num_experts, 3 * hidden * expert, active
    )
    if not plain:
        return (mixtures,)
    return (LayerCost(plain, attention + 3 * hidden * inner), mixtures) if isinstance(inner, int) else None


def _attention(model_config: ModelConfig) -> int:
    """Values of one layer's attention projections."""
    hidden, queries, values = (
        model_config.hidden_size,
        model_config.num_heads * model_config.head_dim,
        model_config.num_heads * model_config.v_head_dim,
    )
    if not model_config.latent:
        return hidden * (queries + model_config.num_kv_heads * (model_config.head_dim + model_config.v_head_dim)) + values * hidden
    rank, rope = model_config.latent
    between = model_config.config.get("q_lora_rank")
    of_queries = hidden * between + between * queries if between else hidden * queries
    return (
        of_queries
        + hidden * (rank + rope)
        + rank * model_config.num_heads * (model_config.head_dim - rope + model_config.v_head_dim)
        + values * hidden
    )


def floor_seconds(cost: ModelCost, ceilings: Ceilings, prompts: Sequence[int], outputs: Sequence[int], shared: int = 0) -> float:
    """Lower bound of the seconds for requests that arrive at once. prompts, outputs: lengths in
    tokens. shared: length of the common prefix, which is computed once and read once per step."""
    operations = cost.prefill(prompts[:1]) + cost.prefill(prompts[1:], shared)
    ins, outs = np.asarray(prompts), np.asarray(outputs)
    seconds = operations / ceilings.operations
    for number in range(1, int(outs.max())):
        live = outs > number
        tokens = shared + int((ins[live] - shared + number).sum())
        seconds += ceilings.seconds(*cost.step(int(live.sum()), tokens))
    return seconds
