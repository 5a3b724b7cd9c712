"""A mixture-of-experts layer: router, dispatch, expert GEMMs, combine, and shared experts.

The dispatcher says which experts a rank holds, whole or sliced in their inner dimension, and moves
tokens; the runner multiplies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.model import ModelContext
from frame.core.interfaces.moe import SupportsPairMatmul
from frame.core.interfaces.platform import SupportsStreams
from frame.kernels.linear.invariant import InvariantMatmul, map_elements
from frame.models.layers.linear import RankSum, RowLinear, add_up, defer_sum, split_range
from frame.models.layers.mlp import GatedMLP, require_silu
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule
from frame.models.layers.router import Router, RoutingRule
from frame.models.layers.weights.expert_deltas import ExpertDeltas
from frame.models.layers.weights.expert_weights import ExpertWeights

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import LayerDelta
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement, MoEDispatcher

    Run = Callable[[DispatchOutput, nn.Module], torch.Tensor]
    AddShared = Callable[..., torch.Tensor]

_OVERLAP_TOKENS = 64  # up to this, neither the experts nor the shared expert fills a GPU, so they overlap on two streams


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The number of experts and their sizes in the whole model. `names`: checkpoint names of an
    expert's gate, up and down. `bias`: an expert's layers have biases. `activation` None:
    SiLU(gate) * up. `gated` False: an expert has no gate, and the activation gets `up` alone."""

    num_experts: int
    hidden: int
    inner: int
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    activation: Callable[..., torch.Tensor] | None = None
    gated: bool = True


class Experts(nn.Module):
    """`gate_up` and `down` of this rank's experts. `prefix` is the checkpoint name that holds
    `N.gate_proj` and so on."""

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, placement: ExpertPlacement) -> None:
        super().__init__()
        is_whole = placement.ranks > 1
        inner = Range.whole(sizes.inner) if is_whole else split_range(context, "inner values of an expert", sizes.inner)
        local = placement.find_local(context.ep_group.rank)
        names = sizes.names if sizes.gated else sizes.names[1:]
        self.weights = ExpertWeights(self, context, prefix, names, (len(local), sizes.hidden, inner))
        self.deltas = ExpertDeltas.register(context, prefix, names, local, (Range.whole(sizes.hidden), inner))
        for place, expert in enumerate(local):
            self.weights.bind(place, expert, Range.whole(sizes.hidden), inner)
        others = sorted(set(placement.logical).difference(local))
        self.foreign_weights = (rf"{re.escape(prefix)}\.(?:{'|'.join(map(str, others))})\.",) if others else ()
        self.activation = sizes.activation
        self.gated = sizes.gated
        self.gate_up_bias: ShardedParameter | None = None
        self.down_bias: ShardedParameter | None = None
        self._adds_bias = is_whole or context.tp.rank == 0  # of `down`, which the sum over the ranks must have once
        if sizes.bias:
            rule = ShardRule(output=1, expert=0)
            self.gate_up_bias = ShardedParameter(torch.empty(len(local), 2 * inner.size, dtype=context.dtype), rule)
            self.down_bias = ShardedParameter(torch.empty(len(local), sizes.hidden, dtype=context.dtype), rule)
            second = Range(inner.full, inner.start, inner.size, inner.size)
            for place, expert in enumerate(local):
                gate, up, down = (f"{prefix}.{expert}.{name}.bias" for name in sizes.names)
                self.gate_up_bias.bind(gate, inner, expert=place)
                self.gate_up_bias.bind(up, second, expert=place)
                self.down_bias.bind(down, expert=place)

    def list_tensors(self) -> list[torch.Tensor]:
        """The weights as they are multiplied, by physical expert; empty if a GEMM kernel has packed
        them."""
        if self.weights.grouped:
            return []
        names = ("gate_up", "down", "gate_up_fp8_scale", "down_fp8_scale", "gate_up_bias", "down_bias")
        return [tensor for name in names if (tensor := getattr(self, name, None)) is not None]

    def run_adapted(self, tokens: DispatchOutput, deltas: ExpertDeltas, parts: bool) -> torch.Tensor:
        """As `MoERunner.run`, or with `parts` as `run_parts`, with the deltas of the tokens'
        adapters."""
        if deltas.runner is not None and not self.weights.grouped:
            return deltas.run(tokens, self, parts)
        return self.weights.run_sorted(tokens, deltas)

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weights into the form that is multiplied."""
        self.weights.prepare_gemms()
        if self.down_bias is not None and not self._adds_bias:
            self.down_bias.data.zero_()


class ExpertRoutes(nn.Module):
    """ids int64 [tokens, k] of logical experts -> the same of physical ones.

    The replicas of an expert take turns by the token's row. Tensors have fixed addresses, so that
    graphs which were captured before a move use the new placement.
    """

    places: torch.Tensor  # int64 [experts, most replicas of one], padded with 0
    replicas: torch.Tensor  # int64 [experts]
    counts: torch.Tensor  # int64 [experts]; the reader clears it

    def __init__(self, placement: ExpertPlacement, num_experts: int, device: torch.device, counts_tokens: bool) -> None:
        super().__init__()
        self._counts_tokens = counts_tokens
        self._route = _find_route(device)
        maximum = len(placement.logical) - num_experts + 1
        # not on the meta device, on which the model is built
        self.register_buffer("places", torch.zeros(num_experts, maximum, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("replicas", torch.ones(num_experts, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)
        self.set_placement(placement)

    def set_placement(self, placement: ExpertPlacement) -> None:
        """Route by this placement from the next call on."""
        places_by_expert: list[list[int]] = [[] for _ in range(len(self.replicas))]
        for place, logical in enumerate(placement.logical):
            places_by_expert[logical].append(place)
        rows = [expert_places + [0] * (self.places.shape[1] - len(expert_places)) for expert_places in places_by_expert]
        self.places.copy_(torch.tensor(rows, device="cpu"))
        self.replicas.copy_(torch.tensor([len(expert_places) for expert_places in places_by_expert], device="cpu"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._route is not None and len(ids) and not torch.compiler.is_compiling():
            return self._route(ids, self.places, self.replicas, self.counts if self._counts_tokens else None)
        if self._counts_tokens:
            chosen = ids.flatten()
            self.counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        if self.places.shape[1] == 1:
            return self.places[:, 0][ids]
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        return self.places[ids, rows % self.replicas[ids]]


class MoE(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. `shared` processes every token. `prefix` is the
    checkpoint name that holds `gate` and `experts`."""

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, rule: RoutingRule, shared: nn.Module | None = None) -> None:
        super().__init__()
        if context.moe_runner is None or context.moe_dispatcher is None:
            raise TypeError("the build context of a mixture of experts needs a runner and a dispatcher")
        if sizes.gated and sizes.activation is None and isinstance(context, ModelContext):
            require_silu(context.model_config.config, "experts")
        self.runner = context.moe_runner
        self.dispatcher = context.moe_dispatcher
        self.router = Router(context, f"{prefix}.gate", sizes.num_experts, sizes.hidden, rule)
        self.placement: ExpertPlacement = self.dispatcher.place_experts(sizes.num_experts)
        plan = context.plan
        self.routes: ExpertRoutes | None = None
        if plan.redundant_experts or plan.balances_experts:
            self.routes = ExpertRoutes(self.placement, sizes.num_experts, context.device, plan.balances_experts)
        if context.adapters is not None and not _can_adapt(context, self.dispatcher):
            context = replace(context, adapters=None)
        self.experts = Experts(context, f"{prefix}.experts", sizes, self.placement)
        self.shared = shared
        self._add_shared = _find_add_shared(context.device)
        # whether the parts of the routed experts need no sum over ranks before they are added
        self._returns_parts = context.ep_group.size == 1
        self._defers = False
        # collectives must be issued in the same order on all ranks
        self._streams = context.platform if isinstance(context.platform, SupportsStreams) else None
        self._overlaps = self._streams is not None and context.ep_group.size == 1
        self._tp = context.tp

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks: one sum of the routed and the shared experts."""
        if not self.dispatcher.only_sums or self._tp.size == 1:
            return
        self._defers = True
        if self.shared is not None:
            defer_sum(self.shared)
            for part in self.shared.modules():
                if isinstance(part, RowLinear):
                    part.sends_pieces = False
            self._returns_parts = hasattr(self.shared, "defer_sum")  # then neither term has a collective
            self._overlaps = self._streams is not None and self._returns_parts

    def forward_normed(
        self, norm: RMSNorm, x: torch.Tensor | RankSum, residual: torch.Tensor
    ) -> tuple[torch.Tensor | RankSum, torch.Tensor]:
        """(this layer of norm(x + residual), x + residual). The first may be [tokens, parts,
        hidden], whose parts the next norm sums."""
        logits, normed = None, norm.join_sum(x, residual) if isinstance(x, RankSum) else None
        if normed is None:
            x = add_up(x)
            joined = self.router.compute_normed_logits(norm, x, residual)
            if joined is not None:
                logits, normed = joined[0], joined[1:]
        inner, residual = norm.add_residual(x, residual) if normed is None else normed
        takes_parts = self.shared is None and self._returns_parts
        return (self._run_experts(inner, logits, self.runner.run_parts) if takes_parts else self(inner, logits)), residual

    def forward(self, x: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor | RankSum:
        """`logits`: the router's logits, if already computed."""
        if self.shared is None:
            return self._run_experts(x, logits)
        add = None if torch.compiler.is_compiling() else self._add_shared
        # the fused sum applies the gate, and sums the parts of a token's experts
        gated = self.shared if add is not None and isinstance(self.shared, GatedSharedExpert) and not self.shared.is_adapted else None
        run_shared = self.shared if gated is None else gated.expert
        run = self.runner.run_parts if add is not None and self._returns_parts else None
        if self._streams is None or not self._overlaps or len(x) > _OVERLAP_TOKENS:
            routed, shared = self._run_experts(x, logits, run), run_shared(x)
        else:
            main, side = self._streams.get_current_stream(), self._streams.get_side_stream()
            side.wait_stream(main)
            with self._streams.use_stream(side):
                shared = run_shared(x)
            routed = self._run_experts(x, logits, run)
            main.wait_stream(side)
        if isinstance(routed, RankSum) and isinstance(shared, RankSum):
            return RankSum(_join(routed.summand, shared.summand, x, gated, add), routed.group)
        return _join(add_up(routed), add_up(shared), x, gated, add)

    def get_counts(self) -> torch.Tensor:
        """See `MovableExperts`."""
        if self.routes is None:
            raise RuntimeError("the plan of this layer's ranks moves no experts")
        return self.routes.counts

    def list_tensors(self) -> list[torch.Tensor]:
        """See `MovableExperts`."""
        return self.experts.list_tensors()

    def set_placement(self, placement: ExpertPlacement) -> None:
        """See `MovableExperts`."""
        self.placement = placement
        if self.routes is not None:
            self.routes.set_placement(placement)
        self.experts.weights.derive()

    def _run_experts(self, x: torch.Tensor, logits: torch.Tensor | None, run: Run | None = None) -> torch.Tensor | RankSum:
        ids, weights = self.router(x, logits)
        if self.router.rule.scales_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if self.routes is not None:
            ids = self.routes(ids)
        tokens = self.dispatcher.dispatch(x, ids, weights, self.placement)
        if not len(tokens.x):  # none came to this rank
            return self.dispatcher.combine(tokens.x, tokens)
        deltas = self.experts.deltas
        if deltas is not None and deltas.is_active:
            out = self.experts.run_adapted(tokens, deltas, parts=run is not None)
        elif self.experts.weights.grouped:
            out = self.experts.weights.run(tokens, parts=run is not None)
        else:
            out = (run or self.runner.run)(tokens, self.experts)
        if self._defers and not torch.compiler.is_compiling():
            return RankSum(out, self._tp)
        return self.dispatcher.combine(out, tokens)


class GatedSharedExpert(nn.Module):
    """A shared expert whose result is scaled by a sigmoid gate of the token (Qwen2-MoE)."""

    def __init__(self, context: BuildContext, prefix: str, gate: str, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.expert = GatedMLP(context, prefix, hidden_size, inner_size)
        self.weight = ShardedParameter(torch.empty(1, hidden_size, dtype=context.dtype))
        self.weight.bind(f"{gate}.weight")
        self.delta: LayerDelta | None = None
        if context.adapters is not None:
            self.delta = context.adapters.add_layer((gate,), Range.whole(hidden_size), (Range.whole(1),))
            self.delta.gemm = lambda x: F.linear(x, self.weight)
        self._is_deterministic = context.deterministic
        self._invariant: InvariantMatmul | None = None

    def process_weights_after_loading(self) -> None:
        """Test the product of the gate."""
        if self._is_deterministic and self._invariant is None:
            self._invariant = InvariantMatmul(self.weight.data)

    @property
    def is_adapted(self) -> bool:
        """Whether a row of this step may have an adapter of the gate."""
        return self.delta is not None and self.delta.is_active

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self.expert.defer_sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor | RankSum:
        gate = F.linear(x, self.weight) if self._invariant is None else self._invariant(x)
        if self.delta is not None and self.delta.is_active:
            self.delta.expand(gate, self.delta.shrink(x))
        gate = torch.sigmoid(gate) if self._invariant is None else map_elements(torch.sigmoid, gate)
        out = self.expert(x)
        return RankSum(gate * out.summand, out.group) if isinstance(out, RankSum) else gate * out


def _can_adapt(context: BuildContext, dispatcher: MoEDispatcher) -> bool:
    """Whether experts have the deltas of adapters. Adapters with experts are otherwise refused, as
    their names find no layer: where tokens move to other ranks without their adapters, where
    experts move, and where only a fused runner reads float8 weights."""
    keeps_tokens = dispatcher.only_sums or context.ep_group.size == 1
    moves_experts = context.plan.redundant_experts or context.plan.balances_experts
    runner = context.moe_runner
    return keeps_tokens and not moves_experts and (isinstance(runner, SupportsPairMatmul) or not getattr(runner, "takes_fp8", ()))


def _find_route(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """The kernel of `ExpertRoutes`, if the device runs Triton."""
    if not kernels.can_use_triton(device):
        return None
    from frame.kernels.moe.expert_routes import route_replicas

    return route_replicas


def _find_add_shared(device: torch.device) -> AddShared | None:
    """The fused sum of routed and shared experts, if the device runs Triton."""
    if not kernels.can_use_triton(device):
        return None
    from frame.kernels.moe.shared_expert import add_shared_expert

    return add_shared_expert


def _join(
    routed: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gated: GatedSharedExpert | None, add: AddShared | None
) -> torch.Tensor:
    """The sum of both. `gated`: the expert whose gate of x is not yet applied to `shared`."""
    if add is None:
        return routed + shared
    return add(routed, shared) if gated is None else add(routed, shared, x, gated.weight.data)


def is_moe_layer(layer: int, step: int, dense_layers: Sequence[int]) -> bool:
    """Whether a Qwen layer is a mixture of experts: every `step`-th layer, except those listed as
    dense."""
    return layer not in dense_layers and (layer + 1) % step == 0
