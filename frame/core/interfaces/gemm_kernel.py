"""The interface of GEMM kernels: the matmul with a weight in canonical form (`gemm_kernel/2`).

A kernel sees one weight in canonical form at a time. It must not know checkpoints, layers or ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from frame.core.interfaces.plugin import Reason, list_device_obstacles
from frame.core.interfaces.weight_format import CanonicalWeight, QuantType

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.rank_context import RankContext
    from frame.core.interfaces.row_operations import RowOperations


_MAXIMUM = 1 << 62  # stands for any number of rows


@dataclass(frozen=True, slots=True)
class Speed:
    """A measured figure: with weights of `quant_type` and up to `rows` rows (0: any number), the
    GEMM is `ratio` times as fast as the unquantized GEMM on the same device.

    `automatic`: `auto` may choose it. False where a kernel takes the memory of unquantized weights.
    """

    quant_type: QuantType
    rows: int
    ratio: float
    automatic: bool = True


@dataclass(frozen=True, slots=True)
class GemmRequirements:
    """What a device requires of GEMM kernels."""

    device: str
    compute_capability: tuple[int, int] | None
    dtype: str  # of activations
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too
    deterministic: bool = False  # execution.deterministic: only what is `batch_invariant` fits


@dataclass(frozen=True, slots=True)
class GemmCapabilities:
    """What a kernel can do. `auto` chooses by `speeds`."""

    devices: tuple[str, ...]
    speeds: tuple[Speed, ...]  # a kernel multiplies the types that it has a speed for
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    min_compute_capability: tuple[int, int] | None = None
    graphs: bool = True  # CUDA graphs can capture it
    batch_invariant: bool = False  # the bits of a row depend on that row alone, under `RankContext.deterministic`

    def unsupported(self, requirements: GemmRequirements) -> list[Reason]:
        return list_device_obstacles(self, requirements)


class Gemm(Protocol):
    """The matmul with one weight.

    It may also have `multiply_gated(x, bias)`: SiLU(first half of the outputs) * second half, [...,
    outputs / 2], or None where a separate activation is as fast for these rows.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What it keeps, for the account of memory; an update writes into them."""
        ...

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., inputs], also of no rows -> [..., outputs], with the bias [outputs] added."""
        ...


class GroupedGemm(Protocol):
    """The matmuls of rows, sorted by expert, with the weights of their experts.

    The GEMM of `gate_up` may also have `mix(down, tokens, experts, parts)`: the result of whole
    experts (`MoERunner.run`, or with `parts` of `MoERunner.run_parts`) for the grouped GEMM
    `down`, or None where the caller sorts the rows and computes the activation. `experts` holds the
    biases and the activation as for a runner.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs], `ends` int32 [experts]: the row after each expert's last -> [rows,
        outputs], also of no rows. Rows after the last end have no result."""
        ...


class GemmKernel(ABC):
    """Makes the GEMMs of weights in canonical form on one device.

    `unpacks`: the kernel dequantizes weights after loading and keeps no quantized values.
    `in_place`: its GEMMs read the quantized values of the weight itself, so weights that are shared
    are not copied.
    `minima`: it multiplies weights with minima; others are not asked about them.
    `row_operations`: what the package also computes between the GEMMs; None: nothing.
    """

    unpacks: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    minima: ClassVar[bool] = False
    row_operations: RowOperations | None = None

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        """Why this kernel does not multiply this weight (its sizes or groups); None: it does. A
        leading dimension of the weight means experts."""

    @abstractmethod
    def prepare(self, weight: CanonicalWeight) -> Gemm:
        """The GEMM with a weight [outputs, inputs]. The caller keeps the weight's tensors only if
        the GEMM does."""

    @abstractmethod
    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        """The GEMM with weights [experts, outputs, inputs]."""

    def count_bytes(self, weight: CanonicalWeight) -> int:
        """The bytes of the tensors that the GEMM with this weight keeps, for the memory plan:
        those of its canonical form, unless overridden. The weight may be on the meta device."""
        return sum(tensor.nbytes for tensor in weight.tensors.values())


def find_kernel_obstacle(kernel: GemmKernel, weight: CanonicalWeight) -> str | None:
    """Why the kernel does not multiply this weight; None: it does."""
    if weight.scheme.minima and not kernel.minima:
        return "it takes no minima"
    return kernel.find_obstacle(weight)


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """A kernel as the layers get it. `required`: the user named it, so it multiplies every weight
    of a type that it has a speed for, or the start is refused."""

    name: str
    kernel: GemmKernel
    speeds: tuple[Speed, ...]
    required: bool = False

    @property
    def unpacks(self) -> bool:
        """Whether the kernel multiplies dequantized weights, which a MoE runner does too."""
        return self.kernel.unpacks

    def multiplies(self, quant_type: QuantType) -> bool:
        """Whether the kernel is made for weights of this type."""
        return any(speed.quant_type == quant_type for speed in self.speeds)


class Rated(Protocol):
    """What `choose_ranges` compares: a name, speeds, and whether the user named it."""

    @property
    def name(self) -> str: ...

    @property
    def speeds(self) -> tuple[Speed, ...]: ...

    @property
    def required(self) -> bool: ...


R = TypeVar("R", bound=Rated)


def choose_ranges(candidates: Sequence[R], quant_type: QuantType) -> list[tuple[int, R]]:
    """(max rows, the kernel for up to so many rows), ascending; the last has 0 for any number.

    A required kernel that multiplies the type is the only one. Otherwise the greatest ratio wins
    for each number of rows. Empty: no candidate multiplies this type, or only few rows.
    """
    for each in candidates:
        if each.required and any(speed.quant_type == quant_type for speed in each.speeds):
            return [(0, each)]
    rated = [(speed, each) for each in candidates for speed in each.speeds if speed.quant_type == quant_type and speed.automatic]
    if not any(speed.rows == 0 for speed, _ in rated):
        return []
    ranges: list[tuple[int, R]] = []
    for rows in sorted({speed.rows for speed, _ in rated}, key=lambda rows: rows or _MAXIMUM):
        covering = [pair for pair in rated if (pair[0].rows or _MAXIMUM) >= (rows or _MAXIMUM)]
        best = max(covering, key=lambda pair: pair[0].ratio)[1]
        if ranges and ranges[-1][1] is best:
            ranges.pop()
        ranges.append((rows, best))
    return ranges
