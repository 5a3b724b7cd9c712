"""The interface of quantization methods: how a layer's weights are stored, loaded and multiplied
(kind `quantization_method`).

A method sees one linear layer, or the experts of one layer, at a time. It must not know the model.
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


LayerKind = Literal["linear", "experts", "head", "embedding"]


@dataclass(frozen=True, slots=True)
class QuantizationRequirements:
    """What a checkpoint and a device require of a method."""

    device: str
    compute_capability: tuple[int, int] | None
    checkpoint: str | None  # `quant_method` of the checkpoint; None: plain weights
    dtype: str  # of the computations
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too


@dataclass(frozen=True, slots=True)
class QuantizationCapabilities:
    """What a quantization method can do."""

    devices: tuple[str, ...]
    checkpoints: tuple[str | None, ...]  # `quant_method`s that it loads; None: plain weights, quantized while loading
    min_compute_capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    graphs: bool = True  # CUDA graphs can capture it

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
    """The weights of one linear layer.

    A method may also have `apply_gated` (`GatedApply`). Layers whose outputs are gate and up call
    it before `apply`.
    """

    def create_weights(self, layer: nn.Module, input_size: int, output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        """Register the layer's parameters, each with its shard rule (see
        `frame.models.layers.parameter`). `output_sizes` are the sizes of the merged parts (q, k, v
        …) on this rank."""
        ...

    def process_weights(self, layer: nn.Module) -> None:
        """Process the weights after loading (repack, quantize). Called again after a weight
        update."""
        ...

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[…, input_size] -> […, sum(output_sizes)]."""
        ...


class GatedApply(Protocol):
    """`apply_gated(layer, x, bias)`: SiLU(first half of the outputs) * second half, […,
    sum(output_sizes) // 2], in one operation.

    None where `apply` and a separate activation are as fast for these rows. Optional.
    """

    def __call__(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True)
class QuantizationContext:
    """The checkpoint that a quantization method is built for."""

    checkpoint_config: dict[str, Any] | None = None  # `quantization_config` of config.json; None: a plain checkpoint


class QuantizationMethod(ABC):
    """Chooses the method of each layer, which covers mixed schemes and ignore lists."""

    ignored_weights: tuple[str, ...] = ()  # regular expressions, matched from the start, of checkpoint names that are not loaded

    def __init__(self, context: QuantizationContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def linear(self, prefix: str, kind: LayerKind = "linear") -> LinearMethod:
        """The method of the layer whose checkpoint name is `prefix`."""

    @abstractmethod
    def experts(self, prefix: str) -> ExpertsMethod:
        """The method of the experts under `prefix`, in a format that the MoE runner takes."""


class ExpertsMethod(Protocol):
    """The weights of one layer's experts: `gate_up` [experts, 2 * inner, hidden] and `down`
    [experts, hidden, inner] on this rank."""

    def create_weights(self, layer: nn.Module, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None: ...

    def process_weights(self, layer: nn.Module) -> None: ...
