"""A mixture of experts with quantized weights by the Triton kernels of
`frame.kernels.moe.quantized_experts`, in two to four launches.

Imported on first use, because it needs Triton. Must not know routing.
"""

from __future__ import annotations

import torch
from torch import nn

from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels import nvidia
from frame.kernels.linear.weight_rows import MAX_PAIRS, choose_rows_plan, count_max_rows, multiply_pair_rows
from frame.kernels.moe.align import CHUNKS, align_tokens
from frame.kernels.moe.grouped_gemm import Activation, Pairs, combine_pairs
from frame.kernels.moe.quantized_experts import FEW_PAIRS, PLAN_ROWS, choose_expert_plan, multiply_pairs
from frame.models.layers.weights.expert_activation import find_activation


class Mixture:
    """Experts whose weights are `gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden,
    inner]. `maximum`: tokens of a step; 0: no variant is compiled ahead."""

    def __init__(self, gate_up: CanonicalWeight, down: CanonicalWeight, maximum: int) -> None:
        self._gate_up, self._down, self._maximum = gate_up, down, maximum
        self._compiled: set[int] = set()  # numbers of experts of a token

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: nn.Module) -> torch.Tensor | None:
        """-> [tokens * k, hidden], weighted, in the order of the pairs; None for an activation
        that the kernels do not compute."""
        activation = find_activation(experts)
        if activation.name == "none":
            return None
        biases = getattr(experts, "gate_up_bias", None), getattr(experts, "down_bias", None)
        top = ids.shape[1]
        if self._maximum and top not in self._compiled and x.device.type == "cuda" and not nvidia.is_capturing():
            self._compiled.add(top)
            for count in self._list_thresholds(top):
                spread = torch.arange(count * top, device=ids.device).remainder_(len(self._gate_up.quantized)).view(count, top)
                self._run(x.new_zeros(count, x.shape[1]), Pairs(spread, weights.new_zeros(count, top)), biases, activation)
        return self._run(x, Pairs(ids.contiguous(), weights.contiguous()), biases, activation)

    def _run(
        self, x: torch.Tensor, pairs: Pairs, biases: tuple[torch.Tensor | None, torch.Tensor | None], activation: Activation
    ) -> torch.Tensor:
        layers = (self._gate_up, activation.is_gated), (self._down, False)
        if pairs.count <= MAX_PAIRS and all(count_max_rows(weight, x.dtype) for weight, _ in layers):
            return self._run_few(x, pairs, biases, activation)
        plans = [choose_expert_plan(pairs.count, weight, gated) for weight, gated in layers]
        order = align_tokens(pairs.ids, len(self._gate_up.quantized), plans[0].rows)
        rows = multiply_pairs(x, self._gate_up, biases[0], pairs, order, plans[0], activation)
        return multiply_pairs(rows, self._down, biases[1], pairs, order, plans[1])

    def _run_few(
        self, x: torch.Tensor, pairs: Pairs, biases: tuple[torch.Tensor | None, torch.Tensor | None], activation: Activation
    ) -> torch.Tensor:
        plans = [choose_rows_plan(weight, pairs.count) for weight in (self._gate_up, self._down)]
        rows = multiply_pair_rows(x, self._gate_up, biases[0], pairs.ids, None, plans[0], activation)
        return multiply_pair_rows(rows, self._down, biases[1], pairs.ids, pairs.weights, plans[1])

    def _list_thresholds(self, top: int) -> list[int]:
        """Numbers of tokens that together use every variant of the kernels."""
        experts = len(self._gate_up.quantized)
        limits = [pairs // top for pairs in (FEW_PAIRS, MAX_PAIRS, *CHUNKS, *(rows * experts for rows in PLAN_ROWS))]
        return sorted({min(self._maximum, max(1, count)) for limit in limits for count in (limit, limit + 1)})


def sum_pairs(rows: torch.Tensor, tokens: int, parts: bool) -> torch.Tensor:
    """Weighted rows in the order of the pairs -> [tokens, hidden], or with `parts` their summands
    [tokens, k, hidden]."""
    return rows.view(tokens, -1, rows.shape[1]) if parts else combine_pairs(rows, len(rows) // tokens)
