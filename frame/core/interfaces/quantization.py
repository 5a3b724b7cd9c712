"""How a layer's weights are stored, loaded and multiplied (`quantization/1`).

A method knows one linear layer (or one set of experts) at a time and nothing of the model around it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import nn

API = "quantization/1"

LayerKind = Literal["linear", "experts", "head", "embedding"]


@dataclass(frozen=True, slots=True)
class QuantizationRequirements:
    """What a checkpoint and a device ask of a method. `checkpoint` is its `quant_method`, None for plain weights."""

    device: str
    compute_capability: tuple[int, int] | None
    checkpoint: str | None
    dtype: str


@dataclass(frozen=True, slots=True)
class QuantizationCapabilities:
    """`checkpoints`: the `quant_method`s that the method loads; None among them: plain weights, quantized while loading."""

    devices: tuple[str, ...]
    checkpoints: tuple[str | None, ...]
    min_compute_capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    graphs: bool = True  # can be captured in a CUDA graph

    def unsupported(self, requirements: QuantizationRequirements) -> list[Reason]:
        reasons = []
        if requirements.device not in self.devices:
            reasons.append(Reason(f"runs on {' or '.join(self.devices)}, not on {requirements.device}"))
        if requirements.checkpoint not in self.checkpoints:
            stored = requirements.checkpoint or "plain"
            reasons.append(Reason(f"does not load {stored} weights"))
        if requirements.dtype not in self.dtypes:
            reasons.append(Reason(f"does not compute in {requirements.dtype}", f"model.dtype: {self.dtypes[0]}"))
        low = self.min_compute_capability
        if low and requirements.compute_capability and requirements.compute_capability < low:
            reasons.append(Reason(f"needs compute capability {low[0]}.{low[1]} or later"))
        return reasons


class LinearMethod(Protocol):
    """The acts for one linear layer. `output_sizes` are the merged parts (q, k, v …) on this rank.

    A method may have a fourth, `apply_gated` (`GatedApply`), which layers whose outputs are gate and up ask for first.
    """

    def create(self, layer: nn.Module, input_size: int, output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        """Register the layer's parameters, each with its shard rule (see `frame.models.layers.parameter`)."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """Repack after loading; may run again after a weight update."""
        ...

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[…, input_size] -> […, sum(output_sizes)]."""
        ...


class GatedApply(Protocol):
    """`apply_gated(layer, x, bias)`: SiLU(first half of the outputs) * second half, […, sum(output_sizes) // 2], in one go.

    None where the method has nothing better than `apply` and the activation after it, for these rows. Optional in `quantization/1`:
    a method without it is complete.
    """

    def __call__(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None: ...


class QuantizationMethod(ABC):
    """Chooses what each layer gets; mixed schemes and ignore lists live here.

    `experts` returns the method that creates and finishes expert weights in a format that the MoE runner takes. `left_out` are regular
    expressions, matched from the start, of checkpoint tensors that the method has no use for.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, checkpoint_config: dict[str, Any] | None = None, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def linear(self, prefix: str, kind: LayerKind = "linear") -> LinearMethod:
        """The method of the layer whose checkpoint name is `prefix`."""

    @abstractmethod
    def experts(self, prefix: str) -> ExpertsMethod:
        """The method of the experts under `prefix`."""


class ExpertsMethod(Protocol):
    """The acts for one layer's experts: `gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner] on this rank."""

    def create(self, layer: nn.Module, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None: ...

    def finish(self, layer: nn.Module) -> None: ...
