"""The two halves of a mixture-of-experts layer: expert GEMMs and token exchange (`moe_runner/1`, `moe_dispatcher/1`).

Routing is the model's; a dispatcher brings tokens to where their experts are and back, a runner multiplies.
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

    from frame.core.interfaces.build import BuildContext

RUNNER_API = "moe_runner/1"
DISPATCHER_API = "moe_dispatcher/1"

# standard: tokens × hidden with expert ids; batched: experts × capacity × hidden
ActivationFormat = Literal["standard", "batched"]

Fp8Scale = Literal["block", "output"]  # what has one scale: 128 x 128 weights, or an output


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens where their experts are. Format "standard": x [tokens, hidden], ids int64 and weights float32 [tokens, k]
    (ids are of this rank's experts; a token's expert that lives elsewhere has weight 0). `state` is the dispatcher's own."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    format: ActivationFormat = "standard"
    state: Any = None


@dataclass(frozen=True, slots=True)
class MoERequirements:
    """What resolve asks of MoE runners and dispatchers for a model on a device."""

    device: str
    compute_capability: tuple[int, int] | None
    dtype: str
    format: ActivationFormat | None = None  # what the dispatcher yields (asked of a runner)
    tp: int = 1


@dataclass(frozen=True, slots=True)
class MoECapabilities:
    """For a runner `formats` are those it takes, for a dispatcher the one it yields."""

    devices: tuple[str, ...]
    formats: tuple[ActivationFormat, ...] = ("standard",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    min_compute_capability: tuple[int, int] | None = None
    graphs: bool = False  # can be captured in a CUDA graph: no shape depends on data, nothing waits for the device

    def unsupported(self, requirements: MoERequirements) -> list[Reason]:
        reasons = []
        if requirements.device not in self.devices:
            reasons.append(Reason(f"runs on {' or '.join(self.devices)}, not on {requirements.device}"))
        if requirements.dtype not in self.dtypes:
            reasons.append(Reason(f"does not compute in {requirements.dtype}", f"model.dtype: {self.dtypes[0]}"))
        if requirements.format is not None and requirements.format not in self.formats:
            reasons.append(Reason(f"takes {' or '.join(self.formats)} activations, the dispatcher yields {requirements.format}"))
        low = self.min_compute_capability
        if low and requirements.compute_capability and requirements.compute_capability < low:
            reasons.append(Reason(f"needs compute capability {low[0]}.{low[1]} or later"))
        return reasons


class MoERunner(ABC):
    """Runs experts over dispatched tokens. Laws: the result is the weighted sum over each token's experts, before any reduction
    over ranks; `experts` holds `gate_up` and `down` as its `ExpertsMethod` created them; activation is SiLU(gate) * up.

    `takes_fp8`: they may be e4m3, with `gate_up_fp8_scale` and `down_fp8_scale` beside them, float32, of these forms: "block",
    [experts, outputs / 128, inputs / 128], or "output", [experts, outputs]. What a runner does not take, methods make plain."""

    takes_fp8: ClassVar[tuple[Fp8Scale, ...]] = ()

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def run(self, tokens: Dispatched, experts: nn.Module) -> torch.Tensor:
        """-> [tokens, hidden] for "standard"."""

    def run_parts(self, tokens: Dispatched, experts: nn.Module) -> torch.Tensor:
        """What `run` gives, or what it would add up for it, [tokens, parts, hidden], where the sum is better left to what comes next."""
        return self.run(tokens, experts)


class MoEDispatcher(ABC):
    """Moves tokens to their experts' ranks and the results back. Law: combine(run(dispatch(x))) is the layer's output on every
    rank that needs it, whatever the placement."""

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched: ...

    @abstractmethod
    def combine(self, out: torch.Tensor, tokens: Dispatched) -> torch.Tensor: ...
