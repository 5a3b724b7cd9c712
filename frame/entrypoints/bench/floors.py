"""The least time that a workload can take on a machine: bytes that must be read and operations that must be done, over its ceilings.

Decode is modelled step by step: every weight that a step touches and every cached token is read once, or the matrix operations take longer;
prefill by its operations. Launches, sampling and the host cost nothing. Knows no engine; shapes come from a model's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frame.core.interfaces.model import ModelFacts


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a machine reaches at best: bytes/s read, operations/s of dense products (a multiplication and an addition are two), and
    bytes/s read and written together, 0 where they were not measured."""

    read: float
    operations: float
    copy: float = 0.0

    def seconds(self, read: float, operations: float) -> float:
        """Of work that reads and multiplies at once."""
        return max(read / self.read, operations / self.operations)


H200 = Ceilings(4.39e12, 780e12, 4.28e12)  # one card, bf16, as measured: docs/performance.md


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Sizes of one model, in values: of a layer's attention and feed-forward matrices (of one expert, where there are `experts`, of which a
    token uses `active`), of the output matrix, of a token's cache in one layer, and of all query heads; bytes of a weight and of a cached
    value."""

    layers: int
    attention: int
    feed_forward: int
    head: int
    cached: int
    queries: int
    experts: int = 0
    active: int = 1
    weight_bytes: int = 2
    cache_bytes: int = 2

    @classmethod
    def of(cls, facts: ModelFacts, weight_bytes: int = 2, cache_bytes: int = 2) -> ModelCost | None:
        """From a configuration; None for shapes that this arithmetic does not know (latent attention, layers of several kinds)."""
        config: dict[str, Any] = facts.config
        experts = facts.num_experts
        inner = config.get("moe_intermediate_size" if experts else "intermediate_size")
        irregular = ("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size", "mlp_only_layers")
        if facts.kind != "mha" or facts.encoder or not isinstance(inner, int) or any(config.get(key) for key in irregular):
            return None
        queries, cached = facts.num_heads * facts.head_dim, facts.num_kv_heads * (facts.head_dim + facts.v_head_dim)
        return cls(
            layers=facts.num_layers,
            attention=facts.hidden_size * (2 * queries + cached),
            feed_forward=3 * facts.hidden_size * inner,
            head=facts.hidden_size * facts.vocab_size,
            cached=cached,
            queries=queries,
            experts=experts,
            active=int(config.get("num_experts_per_tok") or 1) if experts else 1,
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
        )

    def prefill(self, lengths: Sequence[int], cached: int = 0) -> float:
        """Operations of computing prompts of these lengths of which the first `cached` tokens are there already."""
        matrices = 2 * self.layers * (self.attention + self.active * self.feed_forward)
        scores = self.layers * 4 * self.queries / 2
        return float(sum((n - cached) * matrices + 2 * self.head + scores * (n * n - cached * cached) for n in lengths))

    def step(self, rows: int, tokens: float) -> tuple[float, float]:
        """(bytes, operations) of one decode step of `rows` sequences that read `tokens` cached ones in all."""
        touched = self.experts * (1 - (1 - self.active / self.experts) ** rows) if self.experts else 1
        read = self.weight_bytes * (self.layers * (self.attention + touched * self.feed_forward) + self.head)
        read += self.cache_bytes * tokens * self.cached * self.layers
        operations = 2 * rows * (self.layers * (self.attention + self.active * self.feed_forward) + self.head)
        return read, float(operations)


def floor_seconds(cost: ModelCost, ceilings: Ceilings, prompts: Sequence[int], outputs: Sequence[int], shared: int = 0) -> float:
    """Of requests that all come at once, by lengths in tokens. The first `shared` tokens, common to all prompts, are computed once, and
    read once a step."""
    operations = cost.prefill(prompts[:1]) + cost.prefill(prompts[1:], shared)
    ins, outs = np.asarray(prompts), np.asarray(outputs)
    seconds = operations / ceilings.operations
    for number in range(1, int(outs.max())):
        live = outs > number
        tokens = shared + int((ins[live] - shared + number).sum())
        seconds += ceilings.seconds(*cost.step(int(live.sum()), tokens))
    return seconds
