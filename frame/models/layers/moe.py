"""A mixture-of-experts layer: router, dispatch, expert multiplications, combine, and experts that every token shares.

Experts are cut over the ranks in their inner size. How tokens travel is the dispatcher's, how experts multiply the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.models.layers.linear import split_range
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import Range, ShardedParameter, own_parameters
from frame.models.layers.router import Router, RoutingRule

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.moe import Dispatched

    Run = Callable[[Dispatched, nn.Module], torch.Tensor]

_BESIDE_TOKENS = 64  # up to here neither the experts nor the shared one fill a GPU all the time


@lru_cache(maxsize=16)
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Where shared experts run while the others do: one for all layers, which follow one another."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """How many experts there are, and their sizes in the whole model. `names`: the checkpoint's gate, up and down of one expert."""

    num_experts: int
    hidden: int
    inner: int
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class Experts(nn.Module):
    """`gate_up` and `down` of all experts, as the quantization method stores them; `prefix` holds `N.gate_proj` and so on."""

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes) -> None:
        super().__init__()
        if context.quantization is None:
            raise TypeError("a model's context needs a quantization method (`none` for plain weights)")
        inner = split_range(context, "inner values of an expert", sizes.inner)
        self.num_experts = sizes.num_experts
        self.takes_fp8 = context.moe_runner.takes_fp8 if context.moe_runner is not None else ()  # what a method may leave as it is
        self.method = context.quantization.experts(prefix)
        self.method.create(self, sizes.num_experts, sizes.hidden, inner.size, context.dtype)
        gate, up, down = sizes.names
        second = Range(inner.full, inner.start, inner.size, inner.size)
        for key, parameter in own_parameters(self):
            for expert in range(sizes.num_experts):
                if key.startswith("gate_up"):
                    suffix = "weight" + key.removeprefix("gate_up")
                    parameter.bind(f"{prefix}.{expert}.{gate}.{suffix}", inner, None, expert)
                    parameter.bind(f"{prefix}.{expert}.{up}.{suffix}", second, None, expert)
                else:
                    suffix = "weight" + key.removeprefix("down")
                    parameter.bind(f"{prefix}.{expert}.{down}.{suffix}", None, inner, expert)

    def finish(self) -> None:
        """Let the method repack what was loaded."""
        self.method.finish(self)


class MoE(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. `shared` sees every token; `prefix` holds `gate` and `experts`."""

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, rule: RoutingRule, shared: nn.Module | None = None) -> None:
        super().__init__()
        if context.moe_runner is None or context.moe_dispatcher is None:
            raise TypeError("the context of a mixture of experts needs a runner and a dispatcher")
        self.runner = context.moe_runner
        self.dispatcher = context.moe_dispatcher
        self.router = Router(context, f"{prefix}.gate", sizes.num_experts, sizes.hidden, rule)
        self.experts = Experts(context, f"{prefix}.experts", sizes)
        self.shared = shared
        self._leaves_parts = shared is None and context.tp.size == 1  # others are added to, here or on other ranks
        self._overlaps = context.device.type == "cuda" and context.tp.size == 1  # ranks' reductions have to come in one order

    def forward_normed(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what this layer makes of norm(x + residual), x + residual). The first may be [tokens, parts, hidden], for a norm to add up."""
        joined = self.router.compute_normed_logits(norm, x, residual)
        if joined is None:
            x, residual = norm.add_residual(x, residual)
            logits = None
        else:
            logits, x, residual = joined
        return (self._routed(x, logits, self.runner.run_parts) if self._leaves_parts else self(x, logits)), residual

    def forward(self, x: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """`logits`: the router's, where they are known."""
        if self.shared is None:
            return self._routed(x, logits)
        if not self._overlaps or len(x) > _BESIDE_TOKENS:
            return self._routed(x, logits) + self.shared(x)
        here, beside = torch.cuda.current_stream(x.device), _stream_beside(x.device)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            shared = self.shared(x)
        out = self._routed(x, logits)
        here.wait_stream(beside)
        return out + shared

    def _routed(self, x: torch.Tensor, logits: torch.Tensor | None, run: Run | None = None) -> torch.Tensor:
        ids, weights = self.router(x, logits)
        tokens = self.dispatcher.dispatch(x, ids, weights)
        return self.dispatcher.combine((run or self.runner.run)(tokens, self.experts), tokens)


class GatedSharedExpert(nn.Module):
    """A shared expert whose result is weighed by a sigmoid of the token (Qwen2-MoE)."""

    def __init__(self, context: BuildContext, prefix: str, gate: str, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.expert = GatedMLP(context, prefix, hidden_size, inner_size)
        self.weight = ShardedParameter(torch.empty(1, hidden_size, dtype=context.dtype))
        self.weight.bind(f"{gate}.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(F.linear(x, self.weight)) * self.expert(x)


def is_moe_layer(layer: int, step: int, dense_layers: Sequence[int]) -> bool:
    """Whether a Qwen layer is a mixture: every `step`th, but for those listed as dense."""
    return layer not in dense_layers and (layer + 1) % step == 0
