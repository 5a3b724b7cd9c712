"""`ExpertDeltas`: the low-rank deltas of one layer's experts, which are added to the products of
single (token, expert) pairs.

Used by experts in steps whose rows have adapters, in place of fused products. Must not know a
weight's form or a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from frame.core.interfaces.moe import SupportsPairDeltas, SupportsPairMatmul
from frame.models.layers.weights.expert_activation import activate

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import AdapterLayers, LayerDelta
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.moe import DispatchOutput
    from frame.models.layers.parameter import Range

    Multiply = Callable[[Literal["gate_up", "down"], torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertDeltas:
    """The deltas of `gate_up` and `down`. `runner`: None if it has no matmul of pairs."""

    adapters: AdapterLayers
    gate_up: LayerDelta
    down: LayerDelta
    runner: SupportsPairMatmul | None

    @classmethod
    def register(
        cls, context: BuildContext, prefix: str, names: Sequence[str], experts: Sequence[int], spans: tuple[Range, Range]
    ) -> ExpertDeltas | None:
        """Register the layers `prefix`.N.name of the model's `experts` that this rank has. spans:
        (hidden, this rank's inner). None: the experts have no deltas."""
        adapters, runner, (hidden, inner) = context.adapters, context.moe_runner, spans
        if adapters is None or runner is None:
            return None
        *first, down = names
        return cls(
            adapters,
            adapters.add_layer(
                [f"{prefix}.{expert}.{name}" for expert in experts for name in first], hidden, [inner] * len(first), len(experts)
            ),
            adapters.add_layer([f"{prefix}.{expert}.{down}" for expert in experts], inner, [hidden], len(experts)),
            runner if isinstance(runner, SupportsPairMatmul) else None,
        )

    @property
    def is_active(self) -> bool:
        """Whether a row of this step may have an adapter."""
        return self.gate_up.is_active or self.down.is_active

    def run(self, tokens: DispatchOutput, experts: nn.Module, parts: bool) -> torch.Tensor:
        """As `MoERunner.run`, or with `parts` as `run_parts`, by the runner's matmul of pairs, in
        the order of the tokens."""
        assert self.runner is not None
        if isinstance(self.runner, SupportsPairDeltas) and self.gate_up.can_pair and self.down.can_pair:
            summed = self.runner.run_with_deltas(tokens, experts, self.gate_up.shrink_pairs, self.down.shrink_pairs)
            if summed is not None:
                return summed
        multiply, ids, (count, top) = self.runner.multiply_pairs, tokens.ids.flatten(), tokens.ids.shape
        source = torch.arange(count * top, device=ids.device).div_(top, rounding_mode="floor")

        def product(name: Literal["gate_up", "down"], x: torch.Tensor) -> torch.Tensor:
            if name == "gate_up":
                return multiply(tokens.x, tokens.ids, experts, name)
            return multiply(x, ids.unsqueeze(1), experts, name)

        out = self.run_pairs(tokens.x.index_select(0, source), (source, ids), experts, product)
        if (bias := getattr(experts, "down_bias", None)) is not None:
            out = out + bias.index_select(0, ids)
        summands = out.view(count, top, -1).mul_(tokens.weights.unsqueeze(-1))
        return summands if parts else summands.sum(1)

    def run_pairs(
        self,
        x: torch.Tensor,
        pairs: tuple[torch.Tensor, torch.Tensor],
        experts: nn.Module,
        multiply: Multiply,
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        """x [pairs, hidden] -> the results of `down` without bias [pairs, hidden]. pairs: (token of
        the step, expert of this rank), int64 [pairs] each. invariant: of the activation."""
        with self.adapters.select_pairs(*pairs):
            gates = _add_delta(self.gate_up, x, lambda: multiply("gate_up", x))
            inner = activate(experts, gates, pairs[1], invariant=invariant)
            return _add_delta(self.down, inner, lambda: multiply("down", inner))


def _add_delta(delta: LayerDelta, x: torch.Tensor, multiply: Callable[[], torch.Tensor]) -> torch.Tensor:
    if not delta.is_active:
        return multiply()
    shrunk = delta.shrink(x)
    return delta.expand(multiply(), shrunk)
