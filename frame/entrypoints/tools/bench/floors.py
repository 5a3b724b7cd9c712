"""Lower bounds of the time of a workload: bytes to read and operations to compute, divided by the
peak rates of the machine.

A decode step reads its weights and all tokens that it attends to once, reads and writes the states
of recurrent layers, or computes its matrix products, whichever takes longer; prefill counts
operations only. Launches, sampling and host time count as 0.
Must not know an engine; sizes come from a model's configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from frame.core.interfaces.model import ModelConfig, find_dense_layers


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
class WindowCost:
    """Layers whose tokens attend to the last `tokens` ones. cached, pair: as in `ModelCost`."""

    tokens: int
    cached: int
    pair: int

    def pairs(self, length: int) -> float:
        """(query, key) pairs of a prompt."""
        seen = min(length, self.tokens)
        return seen * seen / 2 + (length - seen) * self.tokens


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Sizes of a model in values.

    head: the output matrix. cached: one token's KV cache in all layers. pair: operations per
    (query, key) pair in all layers. window: the part of layers that attend to the last tokens
    alone. state: values of a sequence's recurrent states, float32. recurrence: operations per token
    in recurrent layers. weight_bytes, cache_bytes: bytes per value.
    """

    layers: tuple[LayerCost, ...]
    head: int
    cached: int
    pair: int
    weight_bytes: float = 2
    cache_bytes: int = 2
    window: WindowCost | None = None
    state: int = 0
    recurrence: int = 0

    @classmethod
    def of(cls, model_config: ModelConfig, weight_bytes: float = 2, cache_bytes: int = 2) -> ModelCost | None:
        """The sizes of a model; None if they cannot be computed (encoders, unknown configuration
        names, kinds of layers besides full, sliding and gated-delta attention)."""
        kinds = _layer_kinds(model_config)
        layers = None if model_config.encoder or kinds is None else _layers(model_config, kinds)
        if layers is None or kinds is None:
            return None
        cached = (
            sum(model_config.latent)
            if model_config.latent
            else model_config.num_kv_heads * (model_config.head_dim + model_config.v_head_dim)
        )
        pair = 2 * model_config.num_heads * (model_config.head_dim + model_config.v_head_dim)
        windows, recurrent = kinds.count("sliding_attention"), kinds.count("linear_attention")
        matrices = _delta_sizes(model_config)[2] if recurrent else 0
        full = len(kinds) - windows - recurrent
        return cls(
            layers=layers,
            head=model_config.hidden_size * model_config.vocab_size,
            cached=full * cached,
            pair=full * pair,
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
            window=WindowCost(model_config.sliding_window or 0, windows * cached, windows * pair) if windows else None,
            state=recurrent * matrices,
            recurrence=recurrent * 3 * 2 * matrices,  # what the state holds of a key, the change, and the result
        )

    def prefill(self, lengths: Sequence[int], cached: int = 0) -> float:
        """Operations to prefill prompts whose first `cached` tokens are in the KV cache."""
        matrices = 2 * sum(layers.met for layers in self.layers) + self.recurrence
        pairs = self.pair / 2  # causal: a token attends to half of its prompt on average
        operations = sum((n - cached) * matrices + 2 * self.head + pairs * (n * n - cached * cached) for n in lengths)
        if self.window is not None:
            operations += sum(self.window.pair * (self.window.pairs(n) - self.window.pairs(cached)) for n in lengths)
        return float(operations)

    def step(self, rows: int, tokens: float, in_windows: float = 0) -> tuple[float, float]:
        """(bytes, operations) of one decode step of `rows` sequences with `tokens` cached tokens in
        total, `in_windows` of them in the windows of their sequences."""
        read = self.weight_bytes * (sum(layers.read(rows) for layers in self.layers) + self.head) + self.cache_bytes * tokens * self.cached
        if self.window is not None:
            read += self.cache_bytes * in_windows * self.window.cached
        read += 2 * 4 * rows * self.state  # read and written, float32
        return read, float(rows * (2 * sum(layers.met for layers in self.layers) + self.recurrence + 2 * self.head))


def _layer_kinds(model_config: ModelConfig) -> list[str] | None:
    """What mixes the tokens of each layer; None if a kind has no arithmetic here."""
    config = model_config.config
    kinds = config.get("layer_types")
    if model_config.other_head_dims or "index_topk" in config:  # two head sizes, sparse attention
        return None
    if not kinds:
        if model_config.sliding_window is not None or "hybrid_override_pattern" in config or "linear_attn_config" in config:
            return None
        interval = (config.get("full_attention_interval") or 4) if "linear_num_value_heads" in config else 1
        kinds = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(model_config.num_layers)]
    if "linear_attention" in kinds and "linear_num_value_heads" not in config:
        return None
    has_window = model_config.sliding_window is not None
    known = {"full_attention", "linear_attention", *(("sliding_attention",) if has_window else ())}
    return list(kinds) if set(kinds) <= known and not (has_window and "sliding_attention" not in kinds) else None


def _layers(model_config: ModelConfig, kinds: list[str]) -> tuple[LayerCost, ...] | None:
    """Dense and MoE layers; None if a size has an unknown configuration name."""
    config: dict[str, Any] = model_config.config
    hidden, attention = model_config.hidden_size, _attention(model_config)
    inner: Any = config.get("intermediate_size")
    expert: Any = config.get("moe_intermediate_size") or inner
    active: Any = config.get("num_experts_per_tok")
    has_experts = bool(model_config.num_experts)
    plain = {*find_dense_layers(config, len(kinds)), *(config.get("mlp_only_layers") or ())}
    needed = ([expert, active] if has_experts else [inner]) + ([inner] if plain else [])
    if not all(isinstance(size, int) for size in needed) or (has_experts and (config.get("decoder_sparse_step") or 1) != 1):
        return None
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * (expert or 0)
    counts: Counter[LayerCost] = Counter()
    for layer, kind in enumerate(kinds):
        mixer = attention if kind != "linear_attention" else sum(_delta_sizes(model_config)[:2])
        if has_experts and layer not in plain:
            counts[LayerCost(1, mixer + 3 * hidden * shared, model_config.num_experts, 3 * hidden * expert, active)] += 1
        else:
            counts[LayerCost(1, mixer + 3 * hidden * inner)] += 1
    return tuple(replace(layer, count=count) for layer, count in counts.items())


def _delta_sizes(model_config: ModelConfig) -> tuple[int, int, int]:
    """Of a layer of gated delta network: values of the projections and of the convolution, and
    those of a sequence's matrices."""
    config, hidden = model_config.config, model_config.hidden_size
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    projections = hidden * (2 * keys + 2 * heads * size + 2 * heads) + heads * size * hidden
    convolution = (2 * keys + heads * size) * config.get("linear_conv_kernel_dim", 4)
    return projections, convolution, heads * config["linear_key_head_dim"] * size


def _attention(model_config: ModelConfig) -> int:
    """Values of one layer's attention projections."""
    hidden, queries, values = (
        model_config.hidden_size,
        model_config.num_heads * model_config.head_dim,
        model_config.num_heads * model_config.v_head_dim,
    )
    if not model_config.latent:
        gate = queries if "linear_num_value_heads" in model_config.config else 0  # of the output, in models with gated delta networks
        kv = model_config.num_kv_heads * (model_config.head_dim + model_config.v_head_dim)
        return hidden * (queries + gate + kv) + values * hidden
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
        lengths = ins[live] + number
        tokens = shared + int((lengths - shared).sum())
        in_windows = 0 if cost.window is None else int(np.minimum(lengths, cost.window.tokens).sum())
        seconds += ceilings.seconds(*cost.step(int(live.sum()), tokens, in_windows))
    return seconds
