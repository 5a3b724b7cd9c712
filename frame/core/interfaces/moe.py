"""The two halves of a mixture-of-experts layer: expert GEMMs (`moe_runner/2`) and token exchange
(`moe_dispatcher/2`).

The model routes. A dispatcher moves tokens to the ranks of their experts and back; a runner
computes the experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import nn

    from frame.core.interfaces.rank_context import RankContext


Fp8Scale = Literal["block", "output"]  # one scale for 128 x 128 weights, or one for each output


@dataclass(frozen=True, slots=True)
class DispatchOutput:
    """Tokens on the rank of their experts."""

    x: torch.Tensor  # [tokens, hidden]
    ids: torch.Tensor  # int64 [tokens, k]; indices of this rank's experts
    weights: torch.Tensor  # float32 [tokens, k]; 0 for an expert of another rank
    state: Any = None  # the dispatcher's own, for `combine`


@dataclass(frozen=True, slots=True)
class MoERequirements:
    """What a model and a device require of MoE runners and dispatchers."""

    device: str  # name of the platform: "cpu", "cuda"
    compute_capability: tuple[int, int] | None
    dtype: str
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too


@dataclass(frozen=True, slots=True)
class MoECapabilities:
    """What a MoE runner or dispatcher can do. The two fit together if they share a layout."""

    devices: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    min_compute_capability: tuple[int, int] | None = None
    graphs: bool = False  # can be captured in a CUDA graph: no shape depends on data, nothing waits for the device
    layouts: tuple[str, ...] = ("tokens",)  # of dispatched tokens that it produces or takes; "tokens": those of `DispatchOutput`

    def unsupported(self, requirements: MoERequirements) -> list[Reason]:
        reasons = []
        if requirements.device not in self.devices:
            reasons.append(Reason(f"runs on {' or '.join(self.devices)}, not on {requirements.device}"))
        if requirements.dtype not in self.dtypes:
            reasons.append(Reason(f"does not compute in {requirements.dtype}", f"model.dtype: {self.dtypes[0]}"))
        low = self.min_compute_capability
        if low and requirements.compute_capability and requirements.compute_capability < low:
            reasons.append(Reason(f"needs compute capability {low[0]}.{low[1]} or later"))
        return reasons


class MoERunner(ABC):
    """Computes the experts over dispatched tokens.

    Contract: the result is the weighted sum over each token's experts, before any reduction over
    ranks. `experts` holds `gate_up` and `down` as `ExpertWeights` makes them. The activation
    is SiLU(gate) * up. One runner serves all layers, and writes to none of its arguments.

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


class MoEDispatcher(ABC):
    """Moves tokens to the ranks of their experts and the results back.

    Contract: combine(run(dispatch(x))) is the layer's output on every rank that needs it, for any
    placement of the experts. Neither writes to the layer's tensors. All that `combine` needs is in
    `DispatchOutput`, because another batch may be dispatched before. On one rank, `combine` also
    takes the summands of `run_parts`, [tokens, parts, hidden].
    """

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchOutput: ...

    @abstractmethod
    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor: ...
