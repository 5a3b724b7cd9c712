"""The two halves of a mixture-of-experts layer: expert GEMMs (`moe_runner/2`) and token exchange
(`moe_dispatcher/3`).

The model routes. A dispatcher moves tokens to the ranks of their experts and back; a runner
computes the experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from frame.core.interfaces.parallel import ONE_RANK, ParallelPlan
from frame.core.interfaces.plugin import Reason, list_device_obstacles

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import nn

    from frame.core.interfaces.adapter_layers import ShrinkPairs
    from frame.core.interfaces.rank_context import RankContext


Fp8Scale = Literal["block", "output"]  # one scale for 128 x 128 weights, or one for each output


@dataclass(frozen=True, slots=True)
class DispatchOutput:
    """Tokens on the rank of their experts."""

    x: torch.Tensor  # [tokens, hidden]
    ids: torch.Tensor  # int64 [tokens, k]; indices of this rank's experts, over which those of other ranks are spread
    weights: torch.Tensor  # float32 [tokens, k]; 0 for an expert of another rank
    state: Any = None  # the dispatcher's own, for `combine`


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where experts are: logical (the model's number) -> physical (a place for weights) -> rank.

    `logical`: the logical expert of each physical one. `ranks`: the physical experts are divided
    among so many ranks, in order and equally, and each is whole; 1: every rank holds its slice of
    every expert.
    """

    logical: tuple[int, ...]
    ranks: int = 1

    @classmethod
    def divide(cls, num_experts: int, ranks: int = 1, redundant: int = 0) -> ExpertPlacement:
        """Each logical expert once, in order, and the first `redundant` ones again. Raises
        ValueError unless `ranks` divides them."""
        if (num_experts + redundant) % ranks:
            raise ValueError(f"{num_experts + redundant} experts cannot be divided among {ranks} ranks")
        return cls(tuple(place % num_experts for place in range(num_experts + redundant)), ranks)

    @property
    def per_rank(self) -> int:
        """Physical experts of one rank."""
        return len(self.logical) // self.ranks

    def find_local(self, rank: int) -> tuple[int, ...]:
        """The logical experts of the physical ones that a rank holds; all of them where experts are
        sliced."""
        first = rank * self.per_rank if self.ranks > 1 else 0
        return self.logical[first : first + self.per_rank]


@runtime_checkable
class MovableExperts(Protocol):
    """A layer whose experts can move between ranks. `placement`: where they are now."""

    placement: ExpertPlacement

    def get_counts(self) -> torch.Tensor:
        """The tokens that this rank routed to each logical expert, int64 [experts], on the
        device; steps add to it, and the reader clears it."""
        ...

    def list_tensors(self) -> list[torch.Tensor]:
        """The weights of this rank's physical experts, which are the first dimension; empty if they
        cannot be moved in the form that is multiplied."""
        ...

    def set_placement(self, placement: ExpertPlacement) -> None:
        """Route by another placement, whose weights have been written into `list_tensors`."""
        ...


class ExpertBalance(Protocol):
    """Counts the experts' tokens, and moves experts between steps. `imbalance`: by layer, the
    tokens of the busiest rank over the mean of the ranks, when they were last counted; empty
    before."""

    imbalance: list[float]

    def begin_step(self) -> None:
        """Called by each rank before each step. Collective."""


@dataclass(frozen=True, slots=True)
class MoERequirements:
    """What a model and a device require of MoE runners and dispatchers."""

    device: str  # name of the platform: "cpu", "cuda"
    compute_capability: tuple[int, int] | None
    dtype: str
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too
    biased: bool = False  # runners only: the experts have biases and an activation of their own
    deterministic: bool = False  # execution.deterministic: only what is `batch_invariant` fits
    plan: ParallelPlan = ONE_RANK  # of dispatchers; a runner is independent of it


@dataclass(frozen=True, slots=True)
class MoECapabilities:
    """What a MoE runner or dispatcher can do. The two fit together if they share a layout."""

    devices: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    min_compute_capability: tuple[int, int] | None = None
    graphs: bool = False  # can be captured in a CUDA graph: no shape depends on data, nothing waits for the device
    biased: bool = False  # runners only: computes experts with biases and an activation of their own
    batch_invariant: bool = False  # the bits of a token's result depend on that token alone, under `RankContext.deterministic`
    layouts: tuple[str, ...] = ("tokens",)  # of dispatched tokens that it produces or takes; "tokens": those of `DispatchOutput`

    def unsupported(self, requirements: MoERequirements) -> list[Reason]:
        reasons = list_device_obstacles(self, requirements)
        plan = requirements.plan
        if plan.ep > 1 and not getattr(self, "whole_experts", False):
            reasons.append(Reason("does not exchange tokens between ranks that hold different experts", "parallel.ep: 1"))
        if plan.ep == 1 and not getattr(self, "sliced_experts", True):
            alone = Reason("exchanges tokens between the ranks of parallel.ep, and there is one")
            reasons.append(alone if plan.tp == 1 else Reason("needs whole experts on each rank", f"parallel.ep: {plan.tp}"))
        if plan.num_groups > 1 and not getattr(self, "attention_groups", False):
            reasons.append(Reason("does not exchange the tokens of attention groups", "parallel.dp_attention: false"))
        if requirements.biased and not self.biased:
            reasons.append(Reason("does not compute experts with biases"))
        return reasons


@dataclass(frozen=True, slots=True)
class DispatcherCapabilities(MoECapabilities):
    """What a MoE dispatcher can do."""

    sliced_experts: bool = True  # takes experts of which each rank holds a slice
    whole_experts: bool = False  # takes experts of which each rank holds some (parallel.ep)
    attention_groups: bool = False  # exchanges the tokens of ranks that have different ones (parallel.dp_attention)


class MoERunner(ABC):
    """Computes the experts over dispatched tokens.

    Contract: the result is the weighted sum over each token's experts, before any reduction over
    ranks. `experts` holds `gate_up` and `down` as `ExpertWeights` makes them. The activation
    is SiLU(gate) * up. One runner serves all layers, and writes to none of its arguments.

    Where the capabilities say `biased`, `experts` may also have `gate_up_bias` [experts, 2 * inner]
    and `down_bias` [experts, hidden], and an `activation` (gate, up) -> the factors of `down`;
    each is absent or None otherwise. With `gated` False, `gate_up` is [experts, inner, hidden] and
    the activation gets its products.

    `takes_fp8`: the weights may be e4m3, with float32 scales `gate_up_fp8_scale` and
    `down_fp8_scale` beside them, in these forms:
    "block", [experts, outputs / 128, inputs / 128], or "output", [experts, outputs]. Experts in
    other forms are dequantized, or multiplied by a GEMM kernel.
    """

    takes_fp8: ClassVar[tuple[Fp8Scale, ...]] = ()

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        """-> [tokens, hidden]."""

    def run_parts(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        """The result of `run`, or its summands [tokens, parts, hidden], where the next operation
        adds them at less cost."""
        return self.run(tokens, experts)


@runtime_checkable
class SupportsPairMatmul(Protocol):
    """A runner with its own matmul of single (token, expert) pairs, for steps whose rows have
    adapters: a delta is added before and after the activation. Other runners' weights, unless they
    are float8, are multiplied by PyTorch."""

    def multiply_pairs(self, x: torch.Tensor, ids: torch.Tensor, experts: nn.Module, name: Literal["gate_up", "down"]) -> torch.Tensor:
        """x [tokens, inputs], contiguous; ids int64 [tokens, k] -> [tokens * k, outputs]: each
        token by `gate_up` or `down` of each of its experts, without bias, activation and weight.
        Where the runner's capabilities say `graphs`, graphs can capture it."""
        ...


@runtime_checkable
class SupportsPairDeltas(Protocol):
    """A runner whose kernels add the deltas of adapters to their GEMMs."""

    def run_with_deltas(self, tokens: DispatchOutput, experts: nn.Module, gate_up: ShrinkPairs, down: ShrinkPairs) -> torch.Tensor | None:
        """As `MoERunner.run`, with deltas by both layers' `LayerDelta.shrink_pairs`. None, before
        anything is computed: the runner has no such kernel for these experts."""
        ...


class MoEDispatcher(ABC):
    """Moves tokens to the ranks of their experts and the results back.

    All ranks of `context.tp` have the same tokens. With attention groups, `context.ep_group` has
    several of these groups; all ranks dispatch equal numbers of tokens. `place_experts` says which
    experts each rank gets; `ids` are physical experts.

    Contract: combine(run(dispatch(x))) is the layer's output on every rank, for any
    placement of the experts. Neither writes to the layer's tensors. All that `combine` needs is in
    `DispatchOutput`, because another batch may be dispatched before. On one rank, `combine` also
    takes the summands of `run_parts`, [tokens, parts, hidden], and returns them or their sum.
    """

    only_sums: ClassVar[bool] = False  # `combine` is `context.tp.all_reduce`, which the caller may do later

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        self.context = context

    def place_experts(self, num_experts: int) -> ExpertPlacement:
        """The placement of a layer's experts at the start, the same on all ranks: whole experts in
        order with `parallel.ep`, else slices of all."""
        return ExpertPlacement.divide(num_experts, self.context.plan.ep, self.context.plan.redundant_experts)

    @abstractmethod
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        """x [tokens, hidden], ids int64 [tokens, k], weights float32 [tokens, k]."""

    @abstractmethod
    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        """out [dispatched tokens, hidden] -> [tokens, hidden]."""


def select_local(ids: torch.Tensor, weights: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) in terms of the rank that holds the experts from `first` to `first + count`.
    The others get the weight 0, and are spread over the rank's own."""
    local = ids - first
    return local % count, weights.masked_fill((local < 0) | (local >= count), 0.0)
